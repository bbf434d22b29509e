"""Part E: steps of a large model's shape with weights that say nothing: Qwen3-8B's, with a public drafter's for it.

What a step takes does not depend on the weights; what is accepted does, and is therefore simulated, and called so.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.drafters.block import BlockConfig, BlockModel
from outrider.drafters.block.checkpoint import save_plain
from outrider.kernels.cache import cache_root
from outrider.profiles import store

from ..bench import step_breakdown
from ..errors import UserError
from ..model import target
from ..plugin.hooks import step_profiler
from ..plugin.hooks.step_profiler import COMMIT, DRAFT, PLAN, SAMPLING
from . import step
from .commands import Commands
from .load import step_times
from .report import Measured
from .speed import TARGET_REQUESTS, TARGET_SHARE

PROFILE = "gpu-check-large"
ACCEPTANCE = (0.8, 0.78, 0.76, 0.75, 0.74, 0.73, 0.72)
OURS = (DRAFT, PLAN, SAMPLING, COMMIT)
FORWARD = (step_profiler.PRODUCTS, step_profiler.ATTENTION, step_profiler.SMALL, step_profiler.FORWARD)


def shape(commands: Commands) -> BlockConfig:
    """The drafter's, which is also the target's layers'."""
    if not commands.tiny:
        return step.LARGE
    vocabulary = target.find(None).config["vocab_size"]
    return replace(step.SMALL, vocab_size=vocabulary, num_target_layers=4, target_layers=(1, 2), max_positions=4096)


def tuned(commands: Commands) -> Iterator[Measured]:
    """Step times of a server, which measures itself."""
    most, name = ("2", PROFILE + "-tiny") if commands.tiny else ("64", PROFILE)
    with commands.server("tuned", *_flags(commands)) as url:
        commands.outrider("tune", "tune", "--server", url, "--quick", "--max-requests", most, "--name", name)
    yield from step_times(_profile(commands))


def overhead(commands: Commands) -> Iterator[Measured]:
    """Draft, plan, accept and commit beside the target's forward, each waited for: without what overlaps.

    Greedy batches are accepted and committed by the graph of the forward, sampled ones behind it.
    """
    config, log = shape(commands), commands.folder / "steps.jsonl"
    requests, tokens, seconds = (2, 8, 2) if commands.tiny else (TARGET_REQUESTS, 64, 15)
    for temperature in ("0", "1"):
        log.unlink(missing_ok=True)
        flags = "--planner", "verify-all", *_flags(commands)
        with commands.server("overhead", *flags, **{step_profiler.ENV: str(log)}) as url:
            commands.outrider(
                "asked", "bench", "load", "--url", url, "--concurrency", str(requests), "--input-tokens", "128",
                "--new-tokens", str(tokens), "--temperature", temperature, "--seconds", str(seconds),
                "--warm-up", "1",
            )  # fmt: skip
        found = step_breakdown.read(log)
        wanted = requests * (config.gamma + 1)
        steps = {kind: one for kind, one in found.items() if kind[0] == requests and kind[1] >= wanted and not kind[2]}
        if not steps:
            raise UserError(f"no step verified {wanted} tokens of {requests} requests; see {commands.folder}/asked.log")
        kind, one = max(steps.items(), key=lambda item: item[1].steps)
        case = f"{'sampled' if float(temperature) else 'greedy'}, {requests} requests, {kind[1]} tokens"
        for part, milliseconds in one.parts.items():
            yield Measured(f"{case}: {part}", milliseconds, f"ms of {one.total:.3g}")
        share = sum(one.parts[part] for part in OURS) / sum(one.parts[part] for part in FORWARD)
        yield Measured(f"{case}: ours", share, "of verify", at_most=None if commands.tiny else TARGET_SHARE)


def simulated(commands: Commands) -> Iterator[Measured]:
    """What planning would bring by these step times, if so much were accepted."""
    acceptance = ",".join(map(str, ACCEPTANCE[: shape(commands).gamma]))
    counts = "1,2" if commands.tiny else "1,8,32,64"
    commands.outrider(
        "simulated", "simulate", "--profile", str(_profile(commands).folder), "--acceptance", acceptance,
        "--planners", "off,verify-all,asynchronous", "--concurrency", counts,
        "--steps", "50" if commands.tiny else "500", "--json", commands.folder / "simulated.json",
    )  # fmt: skip
    for row in commands.read("simulated"):
        what = f"SIMULATED acceptance {acceptance}: {row['planner']}, {row['requests']:.0f} requests"
        yield Measured(what, row["throughput"], f"tokens/s, {row['accepted_length']:.2f} a step")


def _profile(commands: Commands) -> store.Profile:
    return store.read(cache_root() / "profiles" / (PROFILE + "-tiny" * commands.tiny))


def _flags(commands: Commands) -> list[str | Path]:
    """Of a server of the model and its drafter, which are made here once."""
    config = shape(commands)
    model, drafter = (commands.folder / name for name in ("target", "drafter"))
    if not (drafter / "config.json").exists():
        with commands.device.on:
            save_plain(BlockModel(config).to(torch.bfloat16), drafter)
    if not (model / "config.json").exists():
        shutil.copytree(
            target.plain_folder(None), model, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*")
        )  # a tokenizer
        save_file({"none": torch.zeros(1)}, model / "model.safetensors")
        (model / "config.json").write_text(json.dumps(target_config(config)))
    flags: list[str | Path] = ["--model", model, "--drafter", "dspark", "--drafter-path", drafter]
    flags += ["--no-lookup", "--gamma", str(config.gamma)]
    small = ["--max-total-tokens", "2048", "--max-running-requests", "4", "--dtype", "bfloat16"]
    return [*flags, *(small if commands.tiny else ["--max-running-requests", "64"]), "--", "--load-format", "dummy"]


def target_config(drafter: BlockConfig) -> dict[str, Any]:
    """config.json of a Qwen3 of the drafter's layers, as many as it says that its target has."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu",
        "head_dim": drafter.head_dim, "hidden_size": drafter.hidden_size, "vocab_size": drafter.vocab_size,
        "intermediate_size": drafter.intermediate_size, "max_position_embeddings": drafter.max_positions,
        "num_attention_heads": drafter.num_heads, "num_hidden_layers": drafter.num_target_layers,
        "num_key_value_heads": drafter.num_kv_heads, "rms_norm_eps": drafter.rms_norm_eps, "rope_scaling": None,
        "rope_theta": drafter.rope_theta, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
