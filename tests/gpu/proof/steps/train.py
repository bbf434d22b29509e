"""Train the shipped DSpark drafter further, for a number of minutes, on answers that the embedded model writes here."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

from timing import TINY, say

import outrider.drafters
from outrider.server.cli.main import main as command
from outrider.server.model import bundled_model

WRITING = 0.4
"""Share of the time for answers; the rest is training, of which a third lowers the learning rate."""
SHIPPED = Path(outrider.drafters.__file__).parent / "weights" / bundled_model.NAME.lower() / "dspark"


def main(minutes: float) -> int:
    began = time.perf_counter()
    work = Path(os.environ["PROOF_STORE"]) / "training"
    target = ["train", "dspark", "--target", str(bundled_model.find_gguf())]
    layers = json.loads((SHIPPED / "config.json").read_text())["target_layer_ids"]
    target += ["--target-layers", *map(str, layers)]
    prompts = ["--self-prompts", "6" if TINY else "20000"]
    answers = ["--temperatures", "0", "0", "0.7", "0", "1", "--answer-tokens", "16" if TINY else "320", "--steps", "0"]
    code = command(
        [*target, "--minutes", f"{minutes * WRITING:.2f}", *prompts, *answers, "--out", str(work / "answers")]
    )
    left = minutes - (time.perf_counter() - began) / 60
    recipe = "--sequences 1 --anchors 96 --lr 5e-4 --warmup 100 --ema 0.998 --alpha-ce 0 --alpha-kl 0.3 --kl-falloff 1"
    recipe += (
        f" --short-block 4 --short-steps 2000 --start {SHIPPED} --data {work}/answers --decay-minutes {left / 3:.2f}"
    )
    code = code or command([*target, "--minutes", f"{left:.2f}", *recipe.split(), "--out", str(work / "dspark")])
    made = Path(os.environ["PROOF_RECORDS"]) / "dspark"
    shutil.rmtree(made, ignore_errors=True)
    code = code or command(["export", str(work / "dspark" / "drafter"), "--storage", "int8", "--out", str(made)])
    say(f"trained for {time.perf_counter() - began:.0f} s: {made}")
    return code


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
