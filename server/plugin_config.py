"""Our own options on their way into SGLang's worker processes, which are spawned and see only the environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

VARIABLE = "OUTRIDER_PLUGIN_CONFIG"


@dataclass(frozen=True)
class PluginConfig:
    drafter: str = "ngram"
    gamma: int = 7

    def to_env(self) -> None:
        os.environ[VARIABLE] = json.dumps(asdict(self))

    @classmethod
    def from_env(cls) -> PluginConfig:
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))
