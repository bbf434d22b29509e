"""Runs the engines of tests/measure/rounding.py in turn, in forks: rounding_turns.py FOLDER.

The logits go to files there, named by arm. Prints the answers as JSON.
"""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import rounding
from rounding import ReadAnswer

from outrider.server.settings.resolve import resolve
from outrider.server.settings.settings import Settings

QUESTIONS = ["What is a river?", "Count from one to twenty."] * 2


def main(folder: str) -> None:
    args = argparse.Namespace(tokens=60, new_tokens=20)
    answers: list[ReadAnswer] = []
    for arm in ("float", "int8"):
        resolved = resolve(Settings(threads=1, drafter="off", disable_radix_cache=True, **rounding.ARMS[arm]))
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            asked = (QUESTIONS, [0.0, 1.0], args)
            answers = pool.submit(rounding._turn, resolved, Path(folder) / arm, answers, *asked).result()
    print(json.dumps([asdict(answer) for answer in answers]))


if __name__ == "__main__":
    main(sys.argv[1])
