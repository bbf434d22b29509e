"""LoRA adapters on a CPU, replacing SGLang's `LoRAManager`, which needs pinned memory and equally many tokens of every
request in a verification.

All loaded adapters stay in memory, so a batch may mix any number of them. A layer's own product is unchanged; where the
batch has adapters, their low-rank products are added to the rows of their requests.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase

from outrider.drafters.adapter_folder import AdapterFolder
from outrider.kernels.low_rank import LowRankWeight, Part, low_rank_product, pack_low_rank

from .. import must_take
from ..layer_names import FUSED

logger = logging.getLogger(__name__)

PRODUCTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
"""A Llama-like model's layers, in the order of `DecoderLayer.weights`."""
Adapter = dict[str, LowRankWeight]
"""Low-rank weights of an adapter, by the name of SGLang's layer."""


def register() -> None:
    """Let SGLang load adapters here, and allow them together with our speculation."""
    from sglang.srt.arg_groups import lora_hook
    from sglang.srt.model_executor.model_runner import ModelRunner

    def init_lora_manager(self: Any) -> None:
        from sglang.srt.runtime_context import get_lora

        self.lora_manager = CpuAdapters(self.model, self.dtype, get_lora().lora_paths or ())

    must_take.replace(ModelRunner, "init_lora_manager", init_lora_manager)
    must_take.replace(lora_hook, "check_lora_speculative_compatibility", lambda server_args: None)


class CpuAdapters:
    """The loaded adapters of a model, and the adapters of the forward under way.

    lora_refs: SGLang's `LoRARef` of each, by its id.
    active: adapters of the forward, each with its rows of the batch (None: all). The methods' names are SGLang's.

    Raises
    ------
    ValueError
        An adapter given at the start does not fit the model.
    """

    attn_dp_enabled = False
    memory_pool = None  # there are no slots
    supports_prefill_cuda_graph = False

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, references: Sequence[Any]):
        self.dtype = dtype
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LinearBase)}
        self.lora_refs: dict[str, Any] = {}
        self.active: list[tuple[Adapter, torch.Tensor | None]] = []
        self._loaded: dict[str, Adapter] = {}
        self._hooked: set[str] = set()
        for reference in references:
            self._load(reference)
        if hasattr(model, "model"):
            setattr(model.model, "outrider_adapters", self)  # noqa: B010  for `fused_model`

    def load_lora_adapter(self, reference: Any) -> Any:
        try:
            self._load(reference)
        except ValueError as error:
            return self._result(str(error))
        return self._result()

    def unload_lora_adapter(self, reference: Any) -> Any:
        """Remove an adapter; SGLang calls it when the adapter's last request has ended."""
        self._loaded.pop(reference.lora_id, None)
        self.lora_refs.pop(reference.lora_id, None)
        self.active = []
        return self._result()

    def validate_lora_batch(self, ids: set[str | None]) -> bool:
        """Return True: any adapters may share a batch."""
        return True

    def fetch_new_loras(self, ids: set[str | None]) -> None:
        """Do no work: all adapters are in memory."""

    def reset_lora_batch(self) -> None:
        """Run the next forward without adapters."""
        self.active = []

    def prepare_lora_batch(self, forward_batch: Any) -> None:
        """Prepare the next forward, of this batch of SGLang's."""
        mode, ids = forward_batch.forward_mode, forward_batch.lora_ids
        if mode.is_target_verify():
            lens = forward_batch.spec_info.ragged_verify_layout.verify_lens
        elif mode.is_decode_or_idle():
            lens = torch.ones(len(ids), dtype=torch.int64)
        else:
            lens = torch.tensor(forward_batch.extend_seq_lens_cpu)
        self.route(ids, lens)

    def route(self, ids: Sequence[str | None], lens: torch.Tensor) -> None:
        """Assign the next forward's rows to requests: adapter (None: without) and number of rows, lens [R], of each."""
        known = list(dict.fromkeys(ids))
        if len(known) == 1:
            self.active = [] if known[0] is None else [(self._loaded[known[0]], None)]
            return
        places = torch.tensor([known.index(each) for each in ids]).repeat_interleave(lens)
        self.active = [
            (self._loaded[each], (places == place).nonzero()[:, 0])
            for place, each in enumerate(known)
            if each is not None
        ]

    def added(self, name: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add the adapters' products of x [N, depth] to out [N, outputs], a layer's products, in place; return out."""
        for adapter, rows in self.active:
            weight = adapter.get(name)
            if weight is None:
                continue
            if rows is None:
                out.add_(low_rank_product(x, weight))
            else:
                out.index_add_(0, rows, low_rank_product(x[rows], weight))
        return out

    def added_to_layer(self, number: int, place: int, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Do `added` for a weight of a Llama-like model's layer, as `outrider.kernels.decoder.Added`."""
        return self.added(f"model.layers.{number}.{PRODUCTS[place]}", x, out)

    def _load(self, reference: Any) -> None:
        try:
            folder = AdapterFolder.open(Path(reference.lora_path))
            adapter = self._prepared(folder)
        except ValueError as error:
            raise ValueError(f"the adapter {reference.lora_name} in {reference.lora_path}: {error}") from None
        self._hook(adapter.keys() - self._hooked)
        self._loaded[reference.lora_id], self.lora_refs[reference.lora_id] = adapter, reference
        logger.info("the adapter %s changes %d layers", reference.lora_name, len(adapter))

    def _prepared(self, folder: AdapterFolder) -> Adapter:
        parts: dict[str, list[Part]] = {}
        for module, (down, up) in folder.weights().items():
            name, first, outputs = self._place(module)
            depth = int(self.layers[name].input_size)
            if (len(up), down.shape[1]) != (outputs, depth):
                raise ValueError(
                    f"it is of another model: its {module} is {len(up)} by {down.shape[1]}, the model's {outputs} by "
                    f"{depth}"
                )
            parts.setdefault(name, []).append(Part(first, down, up, folder.scale(len(down))))
        return {name: pack_low_rank(own, int(self.layers[name].output_size), self.dtype) for name, own in parts.items()}

    def _place(self, module: str) -> tuple[str, int, int]:
        """Return SGLang's layer that holds PEFT's `module`, and the module's first output and number of outputs
        there."""
        if module in self.layers:
            return module, 0, int(self.layers[module].output_size)
        prefix, _, last = module.rpartition(".")
        for stacked, names in FUSED.items():
            if last in names and (name := f"{prefix}.{stacked}") in self.layers:
                sizes, place = self.layers[name].output_sizes, names.index(last)
                return name, sum(sizes[:place]), sizes[place]
        raise ValueError(f"the model has no linear layer {module}")

    def _hook(self, names: set[str]) -> None:
        """Add the adapters' products after these layers, where SGLang runs them."""
        for name in names:
            self.layers[name].register_forward_hook(self._after(name))
        self._hooked |= names

    def _after(self, name: str) -> Any:
        def hook(_: Any, inputs: tuple[Any, ...], outputs: Any) -> Any:
            if self.active:
                self.added(name, inputs[0], outputs[0])

        return hook

    def _result(self, error: str = "") -> Any:
        from sglang.srt.managers.io_struct import LoRAUpdateOutput

        loaded = {each.lora_name: each.lora_path for each in self.lora_refs.values()}
        return LoRAUpdateOutput(success=not error, error_message=error, loaded_adapters=loaded)
