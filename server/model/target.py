"""Finds the model to serve: an embedded one, a GGUF file, a folder, or a name on the Hugging Face hub."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from outrider.profiles.fingerprint import WEIGHT_FILES

from ..errors import UserError
from ..plugin.loading.gguf_weights import GgufWeights, is_prepared
from ..plugin.text_alone import text_of
from . import bundled_model, gguf_model, hub, hub_gguf
from .gguf_file import stem_of

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Model:
    """A model that was found.

    path: folder or hub name, as SGLang takes it.
    name: the model's name in requests.
    config: its config.json. A model of several parts has its text model's fields here, and the whole's
        quantization_config and architectures; the text's architectures if that is served alone.
    folder: None while the weights are still on the hub.
    """

    path: str
    name: str
    config: dict[str, Any]
    folder: Path | None

    @property
    def context_length(self) -> int:
        return int(self.config.get("max_position_embeddings") or 4096)


def find(requested: str | None) -> Model:
    """Find the model and read its config.json; raises UserError with one clear line otherwise."""
    if requested is None:
        folder = bundled_model.prepare()
        return Model(str(folder), bundled_model.NAME, _read_config(folder), folder)
    if requested == bundled_model.DLLM_NAME:
        folder = bundled_model.prepare_dllm()
        return Model(str(folder), bundled_model.DLLM_NAME, _read_config(folder), folder)
    folder = Path(requested).expanduser()
    if folder.is_file():
        return _from_gguf(folder)
    if folder.is_dir():
        folder = folder.resolve()
        config = _read_config(folder)
        if not is_prepared(folder) and not any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES):
            raise UserError(f"{folder} has no weights ({', '.join(WEIGHT_FILES)})")
        return Model(str(folder), folder.name, config, folder)
    if hub_gguf.names_gguf(requested):
        return _from_gguf(hub_gguf.fetch(requested))
    if folder.is_absolute() or requested.startswith((".", "~")) or not hub.NAME.fullmatch(requested):
        raise UserError(f"model folder {requested} does not exist")
    from huggingface_hub import hf_hub_download

    with hub.hub_errors(requested, "--model"):
        config_file = Path(hf_hub_download(requested, "config.json"))
    return Model(requested, requested, _read_config(config_file.parent), None)


def _from_gguf(file: Path) -> Model:
    name = stem_of(file)
    prepared = gguf_model.prepare(file, name)
    return Model(str(prepared), name, _read_config(prepared), prepared)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} is not a model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict) or not (config.get("architectures") or config.get("model_type")):
        raise UserError(f"{folder / 'config.json'} does not describe a model: it names no architecture")
    names = config.get("architectures")
    text = config.get("text_config")
    kind = (text or config).get("model_type", "")
    named = {"architectures": names and [text_of(name, kind) for name in names]}
    if not text:  # older folders have the fields of text and images in one object
        return config | named if names else config
    kept = {name: config[name] for name in ("quantization_config",) if name in config}
    return {**text, **named, **kept}


def plain_folder(requested: str | None) -> str:
    """Find the model as a folder that transformers reads: a GGUF file and the embedded model are unpacked to bfloat16.

    Any other model is returned as `Model.path`.
    """
    model = find(requested)
    return str(gguf_model.unpack(model.folder)) if model.folder and is_prepared(model.folder) else model.path


def check_heads(model: Model, ranks: int) -> None:
    """Raise UserError if `ranks` tensor-parallel ranks cannot share the model's attention heads."""
    heads = model.config.get("num_attention_heads")
    if ranks == 1 or not heads:
        return
    kv_heads = model.config.get("num_key_value_heads") or heads

    def share(count: int) -> bool:
        """Return True if `count` ranks get equally many heads; a head of keys and values may be on several."""
        return heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)

    if not share(ranks):
        possible = ", ".join(str(count) for count in range(1, heads + 1) if share(count))
        raise UserError(
            f"{model.name} has {heads} attention heads and {kv_heads} of keys and values, which --tp-size {ranks} "
            f"ranks cannot share evenly; possible are {possible}"
        )


def weight_bytes(model: Model, float_size: int | None, in_blocks: bool = False) -> int:
    """Return the bytes of the weights once loaded; 0 if that is unknown before loading.

    float_size: bytes per number after conversion; None keeps each tensor's own.
    in_blocks: tensors that a GGUF file stores in blocks known to the kernels stay in blocks.
    """
    if model.folder is None:
        return 0
    if is_prepared(model.folder):
        return GgufWeights(model.folder).bytes_loaded(float_size, in_blocks)
    total = 0
    for path in model.folder.glob("*.safetensors"):
        total += _safetensors_bytes(path, float_size)
    return total or sum(path.stat().st_size for path in model.folder.glob("*.bin"))


def _safetensors_bytes(path: Path, float_size: int | None) -> int:
    total = 0.0
    try:
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                tensor = file.get_slice(name)
                kind = tensor.get_dtype()
                bits = re.search(r"\d+", kind)
                size = int(bits[0]) / 8 if bits else 1
                total += math.prod(tensor.get_shape()) * (float_size if float_size and kind in FLOAT_TYPES else size)
    except (OSError, SafetensorError):
        raise UserError(f"{path} is not a complete safetensors file; fetch it again") from None
    return int(total)
