"""The benchmarks run on the real engine and refuse bad arguments."""

import gzip
from pathlib import Path

import pytest
from records import read_record
from running import ONE_THREAD, run_forked
from small_target import SmallTarget
from tiny_diffusion import TinyDiffusion

from outrider.kernels.cache import cache_root
from outrider.profiles import store


@pytest.mark.server
def test_steps_prints_the_ratio_of_every_shape(tmp_path: Path) -> None:
    flags = (
        "--shapes", "1x1,2x3", "--rounds", "1", "--threads", "1", "--breakdown", str(tmp_path / "traces"), "--json",
        str(tmp_path / "steps.json"),
    )  # fmt: skip
    done = run_forked("bench", "micro", "steps", *flags)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["1x1", "2x3"]
    measured = read_record(tmp_path / "steps.json")["results"]
    for shape, *columns, ratio, _ in (row[:6] for row in rows):
        step, plain, ours = (measured[shape][arm][0] for arm in ("step", "torch", "ours"))
        assert min(map(float, columns)) > 0
        assert float(ratio) == pytest.approx(step / min(plain, ours), abs=0.01)
    traces = sorted((tmp_path / "traces").iterdir())
    assert [trace.name[:3] for trace in traces] == ["1x1", "2x3"]
    for trace in traces:
        assert b"outrider::" in gzip.decompress(trace.read_bytes())


@pytest.mark.server
def test_arms_on_an_engine_without_a_profile(tmp_path: Path, small_target: SmallTarget) -> None:
    """It is measured first, as in a server; all arms give the same answers."""
    (tmp_path / "kernels").symlink_to(cache_root() / "kernels")
    prompts, written = tmp_path / "echo.jsonl", tmp_path / "load.json"
    prompts.write_text('{"turns": ["Repeat the word echo fifty times: echo echo echo echo"]}\n' * 2)
    done = run_forked(
        "bench", "load", "--model", str(small_target.folder), "--drafter", "ngram", "--gamma", "3", *ONE_THREAD,
        "--prompts", str(prompts), "--new-tokens", "40",
        "--count", "2", "--concurrency", "1,2", "--rounds", "1", "--json", str(written),
        "--plot", str(tmp_path / "load.png"), OUTRIDER_CACHE=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "profiles").iterdir()
    assert not store.read(folder).thorough
    assert f"Profile {folder.name}: " in done.stderr
    assert "answers that differ between arms: 0" in done.stdout
    assert "| verify all |" in done.stdout
    measured = read_record(written)
    assert measured["weights"]["target"] == measured["engine"]["target"] != ""
    assert list(measured["results"]) == ["1", "2"]
    for arms in measured["results"].values():
        assert list(arms) == ["off", "verify all", "planned"]
        for [run] in arms.values():
            assert (run["whole"], run["asked"], run["differ"], run["failures"]) == (run["asked"], run["asked"], 0, {})
            assert run["throughput"] > 0
            assert run["output_tokens"] * run["whole"] / run["seconds"] == pytest.approx(run["throughput"], rel=0.05)
        [off], [every] = arms["off"], arms["verify all"]
        assert off["counts"]["tau"] == 1
        counts = every["counts"]
        assert 1 < counts["tau"] <= 4
        assert len(counts["tried"]) == 3
        assert all(kept <= tried for kept, tried in zip(counts["kept"], counts["tried"], strict=True))
        assert counts["tried"][1] == counts["kept"][0]  # drafts are only observed after accepted ones
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.server
def test_every_arm_of_a_block_diffusion_model(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive starts an engine for each policy")
    model, prompts = TinyDiffusion(tied=False).write(tmp_path / "model"), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two three"}\n{"prompt": "the sky is"}\n')
    for policy in ("static", "threshold"):
        done = run_forked(
            "bench", "load", "--model", str(model), "--dtype", "float32", "--unmasking", policy,
            "--unmasking-threshold", "0.3", "--prompts", str(prompts), "--count", "2", "--concurrency", "1",
            "--new-tokens", "8-12", "--rounds", "1", "--json", str(tmp_path / "found.json"),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "answers that differ between arms: 0" in done.stdout
        arms = {arm: run["counts"] for arm, [run] in read_record(tmp_path / "found.json")["results"]["1"].items()}
        assert list(arms) == ["off", "D=0", "D=1", "D=2", "D=3", "planned"]
        assert arms["off"]["tau"] == arms["D=0"]["tau"] <= arms["D=3"]["tau"]
        drafted = [arms[f"D={states}"]["drafted"] / arms[f"D={states}"]["request_forwards"] for states in range(4)]
        assert drafted == sorted(drafted)
        assert drafted[0] == 0 < drafted[1]
