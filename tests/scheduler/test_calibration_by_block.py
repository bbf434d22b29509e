"""Under block verification the meaning of a confidence does not depend on later tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.kernels.acceptance import Verification, accept
from outrider.kernels.noise import gumbel_argmax
from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.fit import fit_joint, fit_table
from outrider.scheduler.calibration.model import Calibration
from outrider.scheduler.calibration.records import Records
from outrider.scheduler.calibration.table import CalibrationTable

COUNT, GAMMA, VOCAB = 60_000, 4, 8
SAMPLED = CLASSES.index("sampled, model")


def records(seed: int, *, by_block: bool, least: float = 0.0, longest: int = GAMMA) -> Records:
    """Blocks with exact token-by-token chances, verified up to a survival of `least`."""
    laws = torch.Generator().manual_seed(0)
    p, q = ((1.2 * torch.randn(VOCAB, VOCAB, generator=laws)).softmax(1) for _ in range(2))
    generator = torch.Generator().manual_seed(seed)

    def keys() -> torch.Tensor:
        return torch.randint(2**62, (COUNT,), generator=generator)

    before = [torch.randint(VOCAB, (COUNT,), generator=generator)]
    for _ in range(GAMMA):
        before.append(gumbel_argmax(q[before[-1]], keys()))
    texts = torch.stack(before, 1)
    confidence = torch.minimum(p, q).sum(1)[texts[:, :-1]]
    verify_lens = (confidence.cumprod(1) >= least).sum(1).clamp(max=longest)
    indptr = torch.nn.functional.pad((verify_lens + 1).cumsum(0), (1, 0))
    request = torch.arange(COUNT).repeat_interleave(verify_lens + 1)
    lens, _ = accept(
        Verification(
            texts[:, 1:], verify_lens, indptr,
            uniforms=torch.rand(COUNT, GAMMA, generator=generator, dtype=torch.float64),
            final_keys=keys(), probs=p[texts[request, torch.arange(len(request)) - indptr[request]]],
            draft_probs=q[texts[:, :-1]], by_block=by_block,
        )
    )  # fmt: skip
    return Records(confidence.numpy(), verify_lens.numpy(), lens.numpy() - 1, np.full(COUNT, SAMPLED))


def errors(found: Records, calibration: Calibration) -> list[float]:
    """Mean confidence minus accepted share, in standard deviations, by position."""
    differences = [(calibration.apply(found.confidence) - found.survived)[found.tested[:, k], k] for k in range(GAMMA)]
    return [float(each.mean() / each.std() * np.sqrt(len(each))) for each in differences if len(each)]


RAW = Calibration.identity(GAMMA)


@pytest.mark.parametrize("least", [0.0, 0.3])
def test_token_by_token_the_chance_of_a_token_is_its_confidence(least: float) -> None:
    assert np.abs(errors(records(1, by_block=False, least=least), RAW)).max() < 4


@pytest.mark.parametrize(("least", "longest"), [(0.0, GAMMA), (0.2, GAMMA), (0.0, 2)])
def test_by_block_a_fit_holds_whatever_is_verified_after_a_token(least: float, longest: int) -> None:
    """After the first token, raw confidences are too low."""
    fitted_on, same = (records(seed, by_block=True, least=least, longest=longest) for seed in (1, 2))
    raw, fitted = errors(same, RAW), errors(same, found := fit_joint(fitted_on))
    assert abs(raw[0]) < 4
    assert np.abs(fitted).max() < 6
    if not least:
        assert max(raw[1:]) < -8
        assert np.abs(errors(records(3, by_block=True), found)[:longest]).max() < 6


def test_a_calibration_names_its_verification_rule(tmp_path: Path) -> None:
    blocks = records(1, by_block=True)
    table = fit_table(blocks, blocks, dataset="", verification="block")
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(table.to_json()))
    assert CalibrationTable.load(path).verification == "block"
