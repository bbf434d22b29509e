"""Loads drafter folders with SGLang's own classes; prints the loaded parameters as JSON: sglang_loads.py TARGET
FOLDER…"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.models.dflash import DFlashDraftModel
from sglang.srt.models.dspark import Qwen3DSparkModel
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.detach().float().contiguous().numpy().tobytes()).hexdigest()


def main(target: str, *folders: str) -> None:
    os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"  # this mode reads the confidence head
    publish(ServerArgs(model_path=target, device="cpu"), role="scheduler")
    loaded = []
    with get_parallel().override(tp_rank=0):
        for folder in folders:
            config = AutoConfig.from_pretrained(folder)
            classes = {"Qwen3DSparkModel": Qwen3DSparkModel, "DFlashDraftModel": DFlashDraftModel}
            model = classes[config.architectures[0]](config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))  # shows parameters that the checkpoint does not fill
            model.load_weights(iter(load_file(Path(folder) / "model.safetensors").items()))
            loaded.append(
                {
                    "block_size": model.block_size,
                    "sample_from_anchor": getattr(model, "sample_from_anchor", True),
                    "layers": model.num_context_features,
                    "unfilled": [n for n, p in model.named_parameters() if p.isnan().any()],
                    "digests": {n: digest(p) for n, p in model.named_parameters()},
                }
            )
    print(json.dumps(loaded))


if __name__ == "__main__":
    main(*sys.argv[1:])
