"""Part F: servers by each attention backend under mixed load, with requests that are given up half way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import UserError
from .commands import OUTRIDER, Commands
from .report import Measured

MINUTES, WARM = 1.2, 0.4
MOST_DEVICE_GROWTH = 64 << 20
"""Bytes; SGLang takes its memory at the start, and torch keeps what it once had."""


@dataclass(frozen=True, slots=True)
class Soak:
    """backend: of SGLang's attention, on a GPU."""

    backend: str

    def __call__(self, commands: Commands) -> Iterator[Measured]:
        on_gpu, name = commands.device.on.type == "cuda", f"soak-{self.backend}"
        minutes, warm = (0.15, 0.05) if commands.tiny else (MINUTES, WARM)
        small = ["--max-total-tokens", "4096"] if commands.tiny else []
        flags = [*small, "--", "--attention-backend", self.backend] if on_gpu else small
        clients = ["--concurrency", "4", "--count", "2", "--new-tokens", "12"] if commands.tiny else []
        used: list[int] = []
        with commands.server(f"server-{self.backend}", *flags) as url:
            asking = [*OUTRIDER, "bench", "soak", "--url", url, "--minutes", str(minutes), "--warm-up", str(warm)]
            timer = threading.Timer(60 * warm, lambda: used.append(commands.device.used()))
            timer.start()
            try:
                more = ["--no-compare", "--json", str(commands.folder / f"{name}.json")]
                if commands.run(name, [*asking, *more, *clients]) not in (0, 1):
                    raise UserError(f"outrider bench soak failed: {commands.last_line(name)}")
            finally:
                timer.cancel()
            used.append(commands.device.used())
        found = commands.read(name)
        counts = found["counts"]
        yield Measured("requests", sum(counts["asked"].values()), f"in {found['seconds']:.0f} s", at_least=1)
        yield Measured("given up", counts["asked"].get("given up", 0), "requests")
        yield Measured("greedy answers", counts["changed"], f"of {counts['compared']} are not what they were alone")
        for fault in found["faults"]:
            yield Measured(fault, 1, "fault", at_most=0)
        yield Measured("faults", len(found["faults"]), "", at_most=0)
        yield Measured("memory of the device", used[-1] - used[0], "bytes more", at_most=MOST_DEVICE_GROWTH)


fa3, flashinfer, outrider = (Soak(backend) for backend in ("fa3", "flashinfer", "outrider"))
