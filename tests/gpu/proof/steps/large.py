"""Step 4: Qwen3-8B's shape with random weights and simulated acceptance: off, verify-all and planned, by `fa3`.

`large.py plain` measures an engine without a drafter, `large.py stock` SGLang's own DSPARK, which simulates the same
number of tokens per step.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from served import engine_settings, measured, seconds_left
from shapes import write_drafter, write_model
from timing import DEVICE, TINY, say, write

CONFIDENCE = 0.8
"""The same as in simulated.py."""
LOADS = (1, 2) if TINY else (1, 8, 32, 128)
CONTEXT, NEW_TOKENS = (64, 8) if TINY else (128, 96)


def folder() -> Path:
    return Path(os.environ.get("PROOF_STORE", "/tmp/outrider-proof")) / "large"


def prepare() -> tuple[Path, Path]:
    """Return the folders of target and drafter, made if missing."""
    model, drafter = folder() / "Qwen3-8B-random", folder() / "dspark"
    if not (drafter / "config.json").exists():
        began = time.perf_counter()
        write_model(model, Path(os.environ["PROOF_TOKENIZER"]))
        write_drafter(drafter)
        say(f"model and drafter are written after {time.perf_counter() - began:.1f} s")
    return model, drafter


def settings(**chosen: Any) -> Any:
    flags = ("--load-format", "dummy")
    if DEVICE == "cuda":
        flags += ("--cuda-graph-max-bs-decode", str(max(LOADS)), "--mem-fraction-static", "0.7")
    return engine_settings(
        model=str(prepare()[0]), lookup=False, max_running_requests=max(LOADS), max_total_tokens=max(LOADS) * 512,
        sglang_flags=flags, **chosen,
    )  # fmt: skip


def drafted() -> None:
    measured("large", settings(drafter_path=str(prepare()[1])), ("off", "planned", "verify all"), LOADS, each=1)


def plain() -> None:
    measured("large-plain", settings(drafter="off"), ("off",), LOADS, trace=False)


def stock() -> None:
    """Return the seconds of a step of SGLang's DSPARK, and of SGLang without speculation, at each load."""
    import sglang

    model, drafter = prepare()
    expected = (1 - CONFIDENCE**8) / (1 - CONFIDENCE)
    os.environ |= {"SGLANG_SIMULATE_ACC_LEN": f"{expected:.2f}", "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}
    results: dict[str, Any] = {"simulated tokens a step": round(expected, 2)}
    common = {
        "model_path": str(model), "load_format": "dummy", "attention_backend": "fa3", "disable_radix_cache": True,
        "max_total_tokens": max(LOADS) * 512, "max_running_requests": max(LOADS), "mem_fraction_static": 0.7,
        "cuda_graph_max_bs_decode": max(LOADS), "log_level": "warning",
    }  # fmt: skip
    kinds: dict[str, dict[str, Any]] = {
        "DSPARK": {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": str(drafter)},
        "none": {},
    }
    for kind, more in kinds.items():
        if seconds_left() < 60:
            results["cut short"] = kind
            break
        began = time.perf_counter()
        engine = sglang.Engine(**common, **more)
        results[kind] = {"start seconds": round(time.perf_counter() - began, 1)}
        for load in LOADS:
            results[kind][str(load)] = [_speed(engine, load) for _ in range(3)]
            say(f"SGLang {kind} at {load}: {results[kind][str(load)]}")
            write("large-stock", results)
        engine.shutdown()


def _speed(engine: Any, load: int) -> dict[str, float]:
    prompts: Sequence[list[int]] = [[100 + (7 * k + 13 * i) % 900 for k in range(CONTEXT)] for i in range(load)]
    parameters = {"temperature": 0, "ignore_eos": True}
    engine.generate(input_ids=prompts, sampling_params=parameters | {"max_new_tokens": 8})
    times = []
    for tokens in (8, 8 + NEW_TOKENS):
        start = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=parameters | {"max_new_tokens": tokens})
        times.append(time.perf_counter() - start)
    about = answers[0]["meta_info"]
    taken = about["completion_tokens"] / max(1, about.get("spec_verify_ct") or about["completion_tokens"])
    seconds = max(times[1] - times[0], 1e-9)
    return {
        "tokens a second": round(load * NEW_TOKENS / seconds, 1), "tokens a step": round(taken, 2),
        "step ms": round(seconds / NEW_TOKENS * taken * 1e3, 3),
    }  # fmt: skip


if __name__ == "__main__":
    {"drafted": drafted, "plain": plain, "stock": stock}[sys.argv[1] if sys.argv[1:] else "drafted"]()
