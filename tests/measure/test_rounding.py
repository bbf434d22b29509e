"""rounding.py: the compared logits, and the numbers computed from them."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import rounding
import rounding_turns
import torch
from own_process import found_by_fork
from refusals import refuses
from rounding import ReadAnswer

from outrider.kernels.cpu import native

ANSWERS = [ReadAnswer([1, 2], [3, 4], 0.0), ReadAnswer([5], [6], 1.0)]
VOCABULARY = 50


def write(path: Path, logits: torch.Tensor) -> Path:
    path.write_bytes(logits.float().numpy().tobytes())
    return path


def test_numbers_of_known_distributions(tmp_path: Path) -> None:
    """Rows 2 and 4 come after the answers and do not count."""
    torch.manual_seed(0)
    reference = torch.randn(5, VOCABULARY)
    moved = reference.clone()
    moved[0, reference[0].argmin()] = 50.0
    moved[2] = 0.0
    moved[3] += 7.0
    moved[4] = 0.0
    divergences = rounding.divergences(ANSWERS, write(tmp_path / "a", reference), write(tmp_path / "b", moved))
    assert list(divergences) == ["greedy", "T = 1", "all"]
    target, inputs = reference.double().log_softmax(-1), moved.double().log_softmax(-1)
    first = float(torch.nn.functional.kl_div(inputs[0], target[0], log_target=True, reduction="sum"))
    assert first > 10
    greedy, sampled, together = divergences.values()
    assert (greedy.answers, greedy.tokens, greedy.same) == (1, 2, 0.5)
    assert greedy.kl == pytest.approx(first / 2)
    assert (sampled.tokens, sampled.same) == (1, 1.0)
    assert sampled.kl == pytest.approx(0, abs=1e-9)
    assert (together.answers, together.tokens) == (2, 3)
    assert together.kl == pytest.approx(first / 3)
    assert together.kl_error == pytest.approx(np.hypot(first - 2 * first / 3, first / 3) / 3)


def test_missing_logits_are_an_error(tmp_path: Path) -> None:
    whole = write(tmp_path / "a", torch.randn(5, VOCABULARY))
    with pytest.raises(ValueError, match="reshape"):
        rounding.divergences(ANSWERS, whole, write(tmp_path / "b", torch.randn(4, VOCABULARY + 1)))


@pytest.mark.server
@pytest.mark.skipif(not native.available(), reason="without compiled kernels no weight is multiplied in blocks")
def test_rows_predict_the_tokens_and_rounding_moves_them_a_little(tmp_path: Path) -> None:
    """An engine that reads its own greedy answers finds each token on top."""
    answers = [ReadAnswer(**fields) for fields in found_by_fork(Path(rounding_turns.__file__), str(tmp_path))]
    rows = np.fromfile(tmp_path / "float", np.float32).reshape(sum(len(one.tokens) + 1 for one in answers), -1)
    assert sum(len(one.tokens) for one in answers) >= 60
    assert {one.temperature for one in answers} == {0.0, 1.0}
    start = 0
    for one in answers:
        best = rows[start : start + len(one.tokens)].argmax(-1).tolist()
        assert (best == one.tokens) == (one.temperature == 0)
        start += len(one.tokens) + 1
    divergence = rounding.divergences(answers, tmp_path / "float", tmp_path / "int8")["all"]
    assert 1e-5 < divergence.kl < 0.05
    assert divergence.same > 0.85


def test_too_many_tokens_are_refused() -> None:
    parser = argparse.ArgumentParser()
    rounding.add_arguments(parser)
    refuses("--new-tokens is at most 1024", rounding.run, parser.parse_args(["--new-tokens", "2000"]))
