"""The benchmarks run on the real engine and refuse what they cannot use."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import pytest
from running import OUTRIDER, environment
from tiny_diffusion import TinyDiffusion

from outrider.kernels.cache import cache_root
from outrider.profiles import store
from outrider.server.bench import diffusion
from outrider.server.errors import UserError


def bench(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [OUTRIDER, "bench", *words], capture_output=True, text=True, env=environment(**variables), check=False
    )


@pytest.mark.server
def test_steps_prints_the_ratio_of_every_shape(tmp_path: Path) -> None:
    done = bench("steps", "--shapes", "1x1,2x3", "--rounds", "1", "--breakdown", "--json", str(tmp_path / "steps.json"))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    ratios, _, parts = done.stdout.partition("\n\n")
    rows = [line.split() for line in ratios.splitlines()[1:]]
    assert [row[0] for row in rows] == ["1x1", "2x3"]
    measured = json.loads((tmp_path / "steps.json").read_text())
    for shape, *columns, ratio, _ in (row[:6] for row in rows):
        step, plain, ours = (measured[shape][arm][0] for arm in ("step", "torch", "ours"))
        assert min(map(float, columns)) > 0
        assert float(ratio) == pytest.approx(step / min(plain, ours), abs=0.01)
    *_, single, several = [[cell.strip() for cell in line.split("|")[1:-1]] for line in parts.splitlines()]
    assert [single[0], several[0]] == ["1x1", "2x3"]
    for _, *spent, total, around in (single, several):
        assert max(map(float, spent)) <= float(total) + 0.06  # they are medians, which need not add up, and rounded
        assert min(map(float, spent)) > 0
        assert float(around) > 0


@pytest.mark.server
def test_where_no_profile_fits_speed_measures_one_first_as_a_server_does(tmp_path: Path) -> None:
    for made in ("kernels", "models"):
        (tmp_path / made).symlink_to(cache_root() / made)
    prompts = tmp_path / "echo.jsonl"
    prompts.write_text('{"turns": ["Repeat the word echo fifty times: echo echo echo echo"]}\n')
    flags = ("--drafter", "ngram", "--prompts", str(prompts), "--count", "1", "--new-tokens", "8", "--rounds", "1")
    done = bench("speed", *flags, OUTRIDER_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "profiles").iterdir()
    assert not store.read(folder).thorough
    assert f"Profile {folder.name}: " in done.stderr


@pytest.mark.server
def test_accept_counts_what_the_engine_accepted(tmp_path: Path) -> None:
    prompts = tmp_path / "echo.jsonl"
    prompts.write_text('{"turns": ["Repeat the word echo fifty times: echo echo echo echo"]}\n' * 2)
    counts = tmp_path / "counts.json"
    done = bench(
        "accept", "--drafter", "ngram", "--gamma", "3", "--prompts", str(prompts), "--new-tokens", "40",
        "--temperatures", "0", "--json", str(counts), "--plot", str(tmp_path / "accept.png"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| echo, T=0 |" in done.stdout
    [found] = json.loads(counts.read_text()).values()
    assert 1 < found["tau"] <= 4
    assert len(found["tried"]) == 3
    assert all(kept <= tried for kept, tried in zip(found["kept"], found["tried"], strict=True))
    assert found["tried"][1] == found["kept"][0]  # a draft is observed behind accepted ones only, and all are verified
    assert (tmp_path / "accept.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.server
def test_diffusion_measures_every_arm_of_every_policy(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive starts an engine for each policy")
    model, prompts = TinyDiffusion(tied=False).write(tmp_path / "model"), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two three"}\n{"prompt": "the sky is"}\n')
    done = bench(
        "diffusion", "--model", str(model), "--dtype", "float32", "--unmasking", "static,threshold",
        "--unmasking-threshold", "0.3", "--prompts", str(prompts), "--count", "2", "--new-tokens", "12",
        "--rounds", "1", "--json", str(tmp_path / "found.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == ["static 1", "threshold 0.3"]
    assert done.stdout.count("answers that differ between arms: 0") == 2
    for policy, arms in ((policy, by_requests["1"]) for policy, by_requests in found.items()):
        assert f"unmasking {policy}" in done.stdout
        forwards = {arm: measured[0]["forwards_per_token"] for arm, measured in arms.items()}
        assert list(forwards) == ["base", "D=0", "D=1", "D=2", "D=3", "planned"]
        assert forwards["base"] == forwards["D=0"] >= forwards["D=3"]
        drafted = [arms[f"D={states}"][0]["drafted_per_forward"] for states in range(4)]
        assert drafted == sorted(drafted)
        assert drafted[0] == 0 < drafted[1]


def test_a_policy_that_there_is_not_is_refused_before_anything_is_measured() -> None:
    parser = argparse.ArgumentParser()
    diffusion.add_arguments(parser)
    for named, says in (("static,best", "--unmasking is one of"), (",", "names no policy")):
        with pytest.raises(UserError, match=says):
            diffusion.run(parser.parse_args(["--prompts", "none.jsonl", "--unmasking", named]))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["steps", "--shapes", "8by8"], "REQUESTSxTOKENS"),
        (["steps", "--shapes", "0x1"], "at least one request"),
        (["accept", "--prompts", "/nowhere.jsonl"], "does not exist"),
        (["accept", "--prompts", __file__], "not JSON"),
        (["speed", "--prompts", __file__, "--concurrency", "two"], "a list of positive numbers like 1,8"),
    ],
)
def test_bad_input_is_one_line(words: list[str], reason: str) -> None:
    done = bench(*words)
    assert done.returncode == 1
    assert reason in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
