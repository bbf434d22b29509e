"""Compile the CUDA sources of SGLang that a server of these models needs, all at once, while other steps run."""

import time
from functools import partial

import torch
from sglang.kernels.jit.utils import parallel_compile
from sglang.kernels.ops.activation.activation import activation_module
from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module
from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module
from shapes import QWEN3_8B
from timing import say

EMBEDDED = {"num_key_value_heads": 3, "head_dim": 64}


def main() -> None:
    began, half = time.perf_counter(), torch.bfloat16
    builders = [partial(activation_module, half), partial(_jit_qknorm_module, QWEN3_8B["head_dim"], half)]
    for model in (EMBEDDED, QWEN3_8B):
        row = model["num_key_value_heads"] * model["head_dim"] * half.itemsize
        builders.append(partial(_jit_kvcache_module, row, row, 0))
        builders.append(partial(_jit_fused_rope_module, True, model["head_dim"], half, half))
    parallel_compile(builders)
    say(f"compiled {len(builders)} modules in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
