"""Step 3: serve the embedded model; arms off, verify-all and planned take turns; take a trace; compare texts."""

import dataclasses
import gzip
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timing import DEVICE, TINY, say, write

from outrider.profiles.fingerprint import STEP_REVISION
from outrider.server.bench import harness
from outrider.server.bench.load.arms import ARMS, Load
from outrider.server.processes import session
from outrider.server.prompt_files import BUILT_IN, read_questions
from outrider.server.settings.resolve import Resolved, resolve
from outrider.server.settings.settings import Settings
from outrider.server.tune.measure import measure_first

LOADS = (1, 2) if TINY else (1, 8, 32)
ROUNDS = 1 if TINY else 3
NEW_TOKENS = (8, 8) if TINY else (96, 160)
CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync", "Synchronize")
"""Host calls counted in a trace, by prefix or suffix of their names."""


def seconds_left() -> float:
    return float(os.environ.get("PROOF_ENDS", "inf")) - time.time()


def measured(
    name: str, settings: Settings, arms: Sequence[str], loads: Sequence[int], each: int = 2, *, trace: bool = True
) -> dict[str, Any]:
    """Start an engine and let the arms take turns on it; return the measurements, written after every round. settings:
    of the engine. each: requests of a turn for each in flight."""
    began = time.perf_counter()
    resolved = resolve(settings, say)
    results: dict[str, Any] = {"loads": {str(load): {arm: [] for arm in arms} for load in loads}}

    async def measurement(engine: Any) -> dict[str, Any]:
        results["start seconds"] = round(time.perf_counter() - began, 1)
        say(f"{name}: the engine is ready after {results['start seconds']} s")
        await measure_first(engine, resolved, say)
        results["tuned after seconds"] = round(time.perf_counter() - began, 1)
        _keep(name, resolved, results)
        load = Load(engine.tokenizer_manager, resolved, 0.0, NEW_TOKENS, None)
        questions = read_questions(BUILT_IN)
        for arm in arms:
            await load.run(questions[:2], 1, ARMS[arm], ask_level=False)
        texts: dict[tuple[int, int], list[str]] = {}
        for number in range(ROUNDS):
            for concurrency in loads:
                if trace and number == 0 and concurrency in (1, 32):
                    results.setdefault("steps", {})[str(concurrency)] = await _trace(load, questions, concurrency, arms)
                for arm in harness.rotated(arms, number):
                    if seconds_left() < 20:
                        results["cut short"] = f"round {number}, {concurrency} in flight"
                        return results
                    count = max(4, each * concurrency)
                    prompts = [questions[(number * count + i) % len(questions)] for i in range(count)]
                    summary, answers = await load.run(prompts, concurrency, ARMS[arm], ask_level=False)
                    first = texts.setdefault((number, concurrency), answers)
                    differ = sum(one != other for one, other in zip(first, answers, strict=True))
                    row = dataclasses.asdict(dataclasses.replace(summary, differ=differ))
                    results["loads"][str(concurrency)][arm].append(_short(row))
                _report(name, results, concurrency)
                _keep(name, resolved, results)
        return results

    return session.run(resolved, measurement)


async def _trace(load: Load, questions: Sequence[str], concurrency: int, arms: Sequence[str]) -> dict[str, Any]:
    """Return host calls and device time of a step, of each arm, from torch's profiler in the scheduler's process."""
    from sglang.srt.managers.io_struct import ProfileReq

    traces = {}
    folder = Path(os.environ.get("PROOF_RECORDS", ".")) / "traces"
    short = dataclasses.replace(load, new_tokens=(24, 24))
    for arm in arms:
        prefix = f"{arm.replace(' ', '-')}-{concurrency}-{time.time_ns()}"
        await load.manager.start_profile(ProfileReq(output_dir=str(folder), profile_prefix=prefix))
        summary, _ = await short.run(questions[:concurrency], concurrency, ARMS[arm], ask_level=False)
        await load.manager.stop_profile()
        for file in sorted(folder.glob(f"{prefix}*.gz")):
            traces[arm] = summed(json.loads(gzip.decompress(file.read_bytes()))["traceEvents"])
            steps = summary.counts["cycles"] / concurrency if summary.counts else 0
            traces[arm] |= {"steps": steps, "seconds": round(summary.seconds, 4)}
            say(f"trace, {arm} at {concurrency}: {traces[arm]}")
    return traces


def summed(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return host calls by name, the device's busy milliseconds, and its kernels' time by name."""
    calls: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    busy, until = 0.0, 0.0
    for event in sorted(events, key=lambda each: each.get("ts", 0)):
        kind, name = event.get("cat", ""), event.get("name", "")
        if kind in ("cuda_runtime", "cuda_driver") and any(call in name for call in CALLS):
            calls[name] += 1
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            begin, end = event["ts"], event["ts"] + event["dur"]
            busy, until = busy + max(0.0, end - max(begin, until)), max(until, end)
            kernels[name[:60]] += event["dur"]
    slow = {name: round(micros / 1e3, 3) for name, micros in kernels.most_common(25)}
    return {"calls": dict(calls), "device busy ms": round(busy / 1e3, 2), "kernels ms": slow}


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of throughput, times and acceptance."""
    kept = ("seconds", "throughput", "per_user", "ttft", "tpot", "differ", "counts")
    return {name: row[name] for name in kept}


def _report(name: str, results: dict[str, Any], concurrency: int) -> None:
    rounds = results["loads"][str(concurrency)]
    base = next(iter(rounds))
    for arm, rows in rounds.items():
        ratios = [a["throughput"] / b["throughput"] for a, b in zip(rows, rounds[base], strict=False)]
        speed = statistics.median(row["throughput"] for row in rows)
        tau = statistics.median(row["counts"]["tau"] for row in rows)
        say(
            f"{name} at {concurrency:3}: {arm:10} {speed:9.1f} tokens/s, {statistics.median(ratios):.2f} x {base}, "
            f"tau {tau:.2f}, {sum(row['differ'] for row in rows)} texts differ"
        )


def _keep(name: str, resolved: Resolved, results: dict[str, Any]) -> None:
    from outrider.server.settings import profile_lookup

    engine = profile_lookup.fingerprint(resolved.settings, resolved.model).to_json()
    write(name, results, engine=engine | {"model": resolved.model.name}, step_revision=STEP_REVISION)


def engine_settings(**chosen: Any) -> Settings:
    """Return engine settings for the loads of this proof."""
    most = max(LOADS)
    flags = () if DEVICE == "cpu" else ("--cuda-graph-max-bs-decode", str(max(most, 8)))
    # SGLang's log at this level has the start's timeline.
    given = {
        "disable_radix_cache": True,
        "max_running_requests": most,
        "max_total_tokens": 1 << 16,
        "log_level": "info",
    }
    return Settings(**(given | {"sglang_flags": flags} | chosen))


def main() -> None:
    measured("served", engine_settings(), ("off", "planned", "verify all"), LOADS, 4)


if __name__ == "__main__":
    main()
