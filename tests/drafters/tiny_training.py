"""Arguments and losses of `outrider train` at tiny size."""

import argparse
import csv
from pathlib import Path

from outrider.drafters.commands.arguments import add_arguments, add_export_arguments
from outrider.drafters.commands.export import export

SMALL = (
    "--dtype float32 --device cpu --threads 1 --answer-tokens 24 --batch 8 --sequences 2 --lr 0.01 --warmup 5 --top 8 "
    "--decay-steps 0"
)


def training(recipe: str, kind: str, target: Path, prompts: Path, out: Path, *more: str) -> argparse.Namespace:
    """recipe, more: flags in addition to SMALL, or in their place."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    folders = ["--target", str(target), "--prompts", str(prompts), "--out", str(out)]
    return parser.parse_args([kind, *folders, *SMALL.split(), *recipe.split(), *more])


def exported(*words: str | Path) -> int:
    """The exit status of `outrider export`."""
    parser = argparse.ArgumentParser()
    add_export_arguments(parser)
    return export(parser.parse_args([*map(str, words)]))


def check_learned(folder: Path, loss: str = "loss") -> list[dict[str, str]]:
    """The rows of a run's losses; checks that it learned."""
    rows = list(csv.DictReader((folder / "losses.csv").open()))
    assert float(rows[-1][loss]) < 0.9 * float(rows[0][loss])
    return rows
