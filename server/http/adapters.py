"""Load and unload adapters while the server runs."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.drafters.adapter_folder import AdapterFolder
from outrider.drafters.learning.owners import Owner

from ..errors import UserError
from ..settings import adapters
from ..settings.resolve import Resolved
from .errors import ApiError, invalid_value


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """lora_name: by which requests name it. lora_path: its folder on the server."""

    lora_name: str
    lora_path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    lora_name: str


class Adapters:
    """Loads and unloads adapters, one at a time. manager: SGLang's tokenizer manager.

    owners: SGLang's id and the owner of each adapter, by name; empty unless adapters have drafters of their own.
    """

    def __init__(self, resolved: Resolved, manager: Any) -> None:
        self._resolved, self._manager, self._changing = resolved, manager, asyncio.Lock()
        self._names: tuple[str, ...] = ()
        self.owners: dict[str, tuple[str, Owner]] = {}
        if resolved.settings.has_adapters:
            adapters = manager.lora_registry.get_all_adapters()
            self._names = tuple(adapters)
            if self._own_drafters:
                self.owners = {n: (each.lora_id, _owner(n, each.lora_path)) for n, each in adapters.items()}

    @property
    def _own_drafters(self) -> bool:
        return self._resolved.settings.learn_per == "adapter"

    def names(self) -> tuple[str, ...]:
        """Return the names that new requests may use. Safe in any thread."""
        return self._names

    async def load(self, name: str, folder: str) -> None:
        """Load an adapter. Raises ApiError if that fails."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        self._check_allowed()
        async with self._changing:
            if not name or name == self._manager.served_model_name or name in self._names:
                raise ApiError(f"the name {name!r} is taken", status=409, param="lora_name", code="conflict")
            try:
                path: Path = adapters.checked(name, folder, self._resolved.settings, self._resolved.model)
                owner = await asyncio.to_thread(_owner, name, str(path)) if self._own_drafters else None
            except (UserError, OSError, ValueError) as error:
                raise invalid_value("lora_path", str(error)) from None
            result = await self._manager.load_lora_adapter(LoadLoRAAdapterReqInput(lora_name=name, lora_path=str(path)))
            if not result.success:
                raise invalid_value("lora_path", result.error_message)
            if owner is not None:
                self.owners[name] = self._manager.lora_registry.get_all_adapters()[name].lora_id, owner
            self._names = (*self._names, name)

    async def unload(self, name: str) -> None:
        """Refuse new requests for an adapter, and unload it after its last one. Raises ApiError if that fails."""
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        self._check_allowed()
        known, self._names = name in self._names, tuple(each for each in self._names if each != name)
        async with self._changing:
            if not known and name not in self._manager.pending_lora_unloads:  # left by a failure
                raise ApiError(f"no adapter {name!r} is loaded", status=404, param="lora_name", code="model_not_found")
            self._manager.lora_ref_cache.pop(name, None)  # else SGLang would reload it for a request under way
            result = await self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))
            if not result.success:
                raise ApiError(f"the adapter {name} was not unloaded: {result.error_message}; try again", status=500)
            self.owners.pop(name, None)  # its last requests have ended

    def _check_allowed(self) -> None:
        settings = self._resolved.settings
        if not settings.enable_lora:
            raise ApiError("start the server with --enable-lora to load adapters here", status=409, code="conflict")
        if settings.resolved_engines > 1:
            raise ApiError("several engines take adapters with --lora-paths alone", status=409, code="conflict")


def _owner(name: str, folder: str) -> Owner:
    return Owner(name, AdapterFolder.open(Path(folder)).digest(), folder)
