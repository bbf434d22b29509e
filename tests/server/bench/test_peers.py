"""Engines side by side: the cheap ones for real, the arithmetic of the report, and input nobody can use."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import OUTRIDER, environment

from outrider.server.bench import environments, isolated, peers
from outrider.server.bench.baselines import Job, answer_all, command
from outrider.server.errors import UserError


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"Count from {n} to ten."]}) + "\n" for n in range(3)))
    return path


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [OUTRIDER, "bench", "peers", *words], capture_output=True, text=True, env=environment(), check=False
    )


def test_two_engines_take_turns(prompts: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    done = bench(
        "--prompts", str(prompts), "--arms", "transformers,llama.cpp", "--concurrency", "2", "--count", "2",
        "--new-tokens", "4", "--prefill", "40", "--rounds", "1",
        "--json", str(tmp_path / "peers.json"), "--plot", str(tmp_path / "peers.png"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "peers.json").read_text())
    measured, engines = written["tokens_per_second"], written["engines"]
    assert set(measured) == {"2", "prefill 40"}
    assert all(rate > 0 for rates in measured.values() for arm in ("transformers", "llama.cpp") for rate in rates[arm])
    first = [line.split()[0] for line in done.stdout.splitlines() if line]
    assert first == ["tokens/s", "2", "prefill", "engine", "llama.cpp", "transformers"]
    assert all(0 < e["pss"] <= e["rss"] and e["ready_seconds"] > 0 for e in engines.values())
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_whole_groups_of_the_same_prompts(prompts: Path) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    args = parser.parse_args(["--prompts", str(prompts), "--count", "3", "--new-tokens", "9", "--no-lookup"])
    cases = peers.make_cases(args, [1, 2, 8], [100])
    assert {name: len(job.prompts) for name, job in cases.items()} == {"1": 4, "2": 8, "8": 32, "prefill 100": 1}
    assert cases["1"].prompts == cases["2"].prompts[:4]
    assert len(cases["prefill 100"].prompts[0]) == 100
    assert cases["prefill 100"].new_tokens == 1
    setups = peers.make_setups(args, {"transformers"}, cases)
    assert setups["transformers"].context >= max(len(p) for p in cases["8"].prompts) + 9
    assert setups["transformers"].requests == 8
    assert setups["transformers"].settings.max_running_requests == 8
    assert not setups["transformers"].settings.lookup


def test_no_more_at_a_time_than_asked() -> None:
    import asyncio

    running = most = 0

    async def generate(prompt: list[int], job: Job) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return job.new_tokens

    took = asyncio.run(answer_all(Job([[1]] * 7, 5, 3), generate))
    assert took["tokens"] == 35
    assert most == 3


def test_a_failing_engine_is_named(prompts: Path) -> None:
    pytest.importorskip("xllamacpp")
    done = bench("--prompts", str(prompts), "--arms", "llama.cpp", "--gguf", __file__, "--concurrency", "1")
    assert done.returncode == 1
    assert "the engine llama.cpp failed" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.server.bench import baselines

    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(UserError, match="pip install --no-deps xllamacpp=="):
        baselines.import_xllamacpp()


def test_ours_over_each_peer_and_over_the_best_at_each_load(capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"outrider-off": [10.0, 12.0, 9.0], "vllm": [5.0, 4.0, 5.0], "openvino": [4.0, 8.0, 3.0]}
    peers.report({"1": rates, "8": rates | {"openvino": [20.0, 20.0, 20.0]}}, list(rates))
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert table[0].split() == ["outrider-off", "over", "vllm", "openvino", "the", "best"]
    assert " ".join(table[1].split()) == "1 2.00 (1.80 to 3.00) 2.50 (1.50 to 3.00) 2.00 (1.80 to 3.00) vllm"
    assert " ".join(table[2].split()) == "8 2.00 (1.80 to 3.00) 0.50 (0.45 to 0.60) 0.50 (0.45 to 0.60) openvino"


@pytest.mark.parametrize("engine", isolated.ENGINES)
def test_an_isolated_engine_is_told_what_it_needs(
    engine: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import argparse

    monkeypatch.setattr(environments, "prepare", lambda name: tmp_path / name)
    monkeypatch.setenv("PYTHONPATH", "/ours")
    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    args = parser.parse_args(["--prompts", str(prompts), "--new-tokens", "9", "--dtype", "bfloat16"])
    setup = peers.make_setups(args, {engine}, peers.make_cases(args, [4], []))[engine]
    (python, script, argument), variables = command(setup)
    told = json.loads(argument)
    assert (python, script) == (str(tmp_path / engine), isolated.__file__)
    assert (told["engine"], told["requests"], told["dtype"]) == (engine, 4, "bfloat16")
    assert any(Path(told["model"] or tmp_path).glob("*.safetensors")) == (engine == "vllm")
    assert Path(told["gguf"]).is_file() == (engine == "openvino")
    assert "PYTHONPATH" not in variables


def test_isolated_engines_import_nothing_of_ours() -> None:
    tree = ast.parse(Path(isolated.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any((module or "").startswith("outrider") for module in modules)


def started(program: str, monkeypatch: pytest.MonkeyPatch) -> peers.Peer:
    """An engine that is this program."""
    surroundings = {"PATH": "/usr/bin:/bin"}
    monkeypatch.setattr(peers.baselines, "command", lambda setup: ([sys.executable, "-c", program], surroundings))
    monkeypatch.setattr(peers, "TOLD_EVERY", 0.1)
    return peers.Peer(peers.Setup("slow", None, "", 1, 1, 1))


def scripted(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, list[float]]) -> None:
    """Each engine is a program that needs so many seconds for its jobs, one after the other, and then ends."""
    program = """if True:
        import json, sys
        print('{"ready": true}', flush=True)
        for seconds, line in zip(json.loads(sys.argv[1]), sys.stdin):
            job = json.loads(line)
            print(json.dumps({"seconds": seconds, "tokens": len(job["prompts"]) * job["new_tokens"]}), flush=True)
    """
    path = {"PATH": "/usr/bin:/bin"}
    monkeypatch.setattr(
        peers.baselines,
        "command",
        lambda setup: ([sys.executable, "-c", program, json.dumps(seconds[setup.engine])], path),
    )


def test_a_run_that_lost_an_engine_is_taken_up_where_it_stopped(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    file = tmp_path / "peers.json"
    words = ["--prompts", str(prompts), "--arms", "transformers,sglang", "--concurrency", "1,2", "--prefill", ""]
    words += ["--rounds", "2", "--new-tokens", "4", "--json", str(file)]
    warm = [1.0, 1.0]
    scripted(monkeypatch, {"transformers": [*warm, 1, 1, 1, 1], "sglang": [*warm, 1, 1]})
    assert peers.run(parser.parse_args(words)) == 1
    said = capsys.readouterr()
    assert "sglang is left out: the engine sglang failed: its process ended" in said.err
    assert "transformers" in said.out
    assert "sglang" not in said.out
    rates = json.loads(file.read_text())["tokens_per_second"]
    assert {case: [len(rates[case][arm]) for arm in rates[case]] for case in rates} == {"1": [2, 1], "2": [2, 1]}

    scripted(monkeypatch, {name: [*warm, 2, 2] for name in ("transformers", "sglang")})
    assert peers.run(parser.parse_args([*words, "--resume"])) == 0
    again = json.loads(file.read_text())["tokens_per_second"]
    for case in again:
        for arm in again[case]:
            assert again[case][arm] == [rates[case][arm][0], rates[case][arm][0] / 2]
    with pytest.raises(UserError, match="measured with --new-tokens 4, not 5"):
        peers.run(parser.parse_args([*words, "--new-tokens", "5", "--resume"]))
    file.write_text("[]")
    with pytest.raises(UserError, match="is not what bench peers writes"):
        peers.run(parser.parse_args([*words, "--resume"]))


def test_an_engine_that_compiles_for_long_is_waited_for_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = """if True:
        import json, sys, time
        print('{"ready": true}', flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            time.sleep(0.5 if job["concurrency"] == 2 else 0)
            print(json.dumps({"seconds": 1, "tokens": len(job["prompts"]) * job["new_tokens"]}), flush=True)
    """
    peer = started(program, monkeypatch)
    try:
        peer.warm_up(peers.warm_ups([Job([[1]] * 8, 128, 1), Job([[1]] * 8, 128, 2)]))
    finally:
        peer.end()
    said = capsys.readouterr().err
    assert "slow: warm-up with 2 in flight, 0 s" in said
    assert "warm-up with 1 in flight" not in said


def test_an_engine_that_never_starts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PATIENCE", 0.3)
    with pytest.raises(UserError, match="slow did not end its start within"):
        started("import sys; sys.stdin.read()", monkeypatch)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--arms", "mlx"], "--arms is a list of outrider"),
        (["--concurrency", "1,0"], "a list of positive numbers"),
        (["--concurrency", "", "--prefill", ""], "nothing to measure"),
        (["--rounds", "0"], "at least 1"),
        (["--resume"], "the file that --json names"),
        (["--device", "cuda"], "CPU"),
    ],
)
def test_bad_input(prompts: Path, words: list[str], reason: str) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    with pytest.raises(UserError, match=reason):
        peers.run(parser.parse_args(["--prompts", str(prompts), *words]))
