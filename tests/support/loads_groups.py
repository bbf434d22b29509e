"""Load model folders with SGLang and our plugin; prints a JSON list: the digest of each linear layer's products.

A program of its own, since SGLang's configuration is global to a process: loads_groups.py FOLDER…
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

from outrider.server.plugin import activate


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()


def rows_for(depth: int) -> torch.Tensor:
    return torch.randn(5, depth, generator=torch.Generator().manual_seed(depth)).bfloat16()


def main() -> None:
    activate()
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from outrider.server.plugin.cpu import fused_ops

    fused_ops.register()
    found = []
    for folder in sys.argv[1:]:
        arguments = ServerArgs(model_path=folder, device="cpu", dtype="bfloat16")
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
        if not found:
            store = f"file://{Path.cwd() / 'ranks'}"
            init_distributed_environment(world_size=1, rank=0, distributed_init_method=store, backend="gloo")
            initialize_model_parallel()
        config = ModelConfig.from_server_args(arguments)
        loader = DefaultModelLoader(LoadConfig())
        model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
        products = {}
        for name, layer in model.named_modules():
            if isinstance(layer, LinearBase):
                products[name] = digest(layer.quant_method.apply(layer, rows_for(layer.input_size)))
        found.append(products)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
