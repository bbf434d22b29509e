"""Prints a digest of each linear layer's products as JSON, for folders loaded by SGLang with our plugin:
loads_groups.py FOLDER…"""

import hashlib
import json
import sys

import torch

from outrider.server.plugin import activate


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()


def rows_for(depth: int) -> torch.Tensor:
    return torch.randn(5, depth, generator=torch.Generator().manual_seed(depth)).bfloat16()


def main(*folders: str) -> None:
    activate()
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from single_rank import publish_alone

    from outrider.server.plugin.cpu import fused_ops

    fused_ops.register()
    digests = []
    for folder in folders:
        arguments = publish_alone(model_path=folder, dtype="bfloat16")
        config = ModelConfig.from_server_args(arguments)
        loader = DefaultModelLoader(LoadConfig())
        model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
        products = {}
        for name, layer in model.named_modules():
            if isinstance(layer, LinearBase):
                products[name] = digest(layer.quant_method.apply(layer, rows_for(layer.input_size)))
        digests.append(products)
    print(json.dumps(digests))


if __name__ == "__main__":
    main(*sys.argv[1:])
