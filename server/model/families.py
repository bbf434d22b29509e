"""SGLang's architectures: which ones are served, and the reason for each refusal; `families.toml` lists them.

Tests keep the lists true: `tests/server/model/test_families.py` checks that every name of SGLang's registry is here,
and `test_families_served.py` compares answers with Transformers. For any other name SGLang runs Transformers' model
with its own layers, or reports that it cannot.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..plugin.text_alone import TEXT
from .target import Model


@dataclass(frozen=True, slots=True)
class Refused:
    """Architectures that are refused for one reason.

    kind: their common property. on_gpu: refused on GPUs too. names: separated by white space.
    """

    kind: str
    reason: str
    on_gpu: bool
    names: str


LIST = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
BY_TRANSFORMERS, RECURRENT = (frozenset(LIST["served"][name].split()) for name in ("by_transformers", "recurrent"))
TRANSFORMERS = ["TransformersForCausalLM", "TransformersMoEForCausalLM"]
TEXTS = frozenset(TEXT) - RECURRENT
"""Served on CPUs by the architecture of their text, `IMAGES` of them with images; on GPUs as SGLang does."""
SERVED = RECURRENT | BY_TRANSFORMERS | TEXTS | {*LIST["served"]["everywhere"].split()}
SHOWING = RECURRENT | {*LIST["served"]["showing_states"].split()}
REFUSED = tuple(Refused(**each) for each in LIST["refused"])

STATEFUL = frozenset({"conv", "linear_attention", "mamba", "recurrent"})
"""Layers, as `layer_types` names them, that keep a state in place of keys and values."""
STATES = next(each for each in REFUSED if "MambaForCausalLM" in each.names.split())
SEVERAL_POSITIONS = Refused(
    "M-RoPE", "its tokens have three positions each (M-RoPE), and drafts one", on_gpu=True, names=""
)
REASONS = {name: each for each in REFUSED for name in each.names.split()}


def is_recurrent(model: Model) -> bool:
    """Return True for a served model that keeps a state of each request."""
    return next(iter(model.config.get("architectures") or ()), "") in RECURRENT


def on_a_cpu(model: Model) -> list[str]:
    """Return SGLang's architectures that run the model on a CPU."""
    names = list(model.config.get("architectures") or ())
    return TRANSFORMERS if BY_TRANSFORMERS & {*names[:1]} else names


def check(model: Model, device: str) -> None:
    """Raise UserError, with the reason in one line, where the model's architecture is not served on "cpu" or "cuda"."""
    name = next(iter(model.config.get("architectures") or ()), "")
    refused = REASONS.get(name)
    if is_recurrent(model):
        if device == "cuda":
            reason = "its recurrent state follows accepted tokens on CPUs alone"
            raise UserError(f"{model.name} ({name}) is not served on a GPU: {reason}")
        return
    rope = model.config.get("rope_parameters") or model.config.get("rope_scaling") or {}
    if STATEFUL & {*(model.config.get("layer_types") or ())}:
        refused = STATES
    elif "mrope_section" in rope and (refused is None or not refused.on_gpu):
        alone = device == "cpu" and name in TEXT.values()
        refused = None if alone else SEVERAL_POSITIONS
    if refused is None or (device == "cuda" and not refused.on_gpu):
        return
    where = "" if refused.on_gpu else " on a CPU"
    raise UserError(f"{model.name} ({name or 'no architecture named'}) is not served{where}: {refused.reason}")
