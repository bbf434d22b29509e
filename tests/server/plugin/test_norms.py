"""Norms on a GPU in float32, for which sglang-kernel has no kernel."""

import pytest
import torch
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm

from outrider.server.plugin.cuda import norms


def refused(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """sglang-kernel's error for float32."""
    raise RuntimeError(f"failed to dispatch data type {x.dtype}")


@pytest.mark.parametrize(("hook", "norm"), [(norms.rmsnorm, RMSNorm), (norms.gemma_rmsnorm, GemmaRMSNorm)])
def test_float32_equals_sglangs_reference(hook, norm) -> None:
    reference, x = norm(48, eps=1e-3), torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    reference.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(hook(refused, x, reference.weight.data, 1e-3), reference.forward_native(x))


@pytest.mark.parametrize("hook", [norms.rmsnorm, norms.gemma_rmsnorm])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_computed_by_sglang(hook, dtype) -> None:
    x, weight, theirs = torch.ones(2, 8, dtype=dtype), torch.ones(8, dtype=dtype), torch.zeros(2, 8, dtype=dtype)
    assert hook(lambda *given: theirs if given == (x, weight, 1e-6) else None, x, weight, 1e-6) is theirs
