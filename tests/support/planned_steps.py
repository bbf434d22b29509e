"""Decode steps, planned as by the worker.

All tensors live on the CPU. `device="cuda"` makes StepPlanner treat them as device tensors, which come to the host when
the next step has been launched.
"""

import numpy as np
import pytest
import torch
from planning import request

from outrider.drafters.base import Draft
from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.model import Calibration
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.server.plugin.options import RequestOptions

GAMMA = 4
ROWS = 8
PAYS = [1.0] * (2 * GAMMA + 1)
"""Seconds of a step by admitted tokens: verification is free."""

HALVED = CalibrationTable.of(dict.fromkeys(CLASSES, Calibration((2.0,) * GAMMA)), GAMMA)
"""Halves the log odds of every confidence."""

on_every_device = pytest.mark.parametrize("device", ["cpu", "cuda"])


def prefill(planning, *rows, **options):
    planning.interrupt()
    params = RequestOptions(**options).to_custom_params()
    planning.requests.admit([request(custom_params=params) for _ in rows], torch.tensor(rows))


def begin(planning, *rows, contexts=10):
    count = len(rows)
    return planning.begin(np.array(rows), np.full(count, contexts), torch.zeros(count, dtype=torch.int64))


def admit(planning, step, confidence=0.9, lens=GAMMA):
    """Admit drafts of a drafter without lookup."""
    asks = torch.from_numpy(step.draft_mask)
    tokens = torch.zeros(len(asks), GAMMA, dtype=torch.int64)
    draft = Draft(tokens, lens * asks, confidence * asks[:, None].repeat(1, GAMMA), drafting=int(asks.sum()))
    return planning.admit(step, draft, 0.125 if planning.on_host else None)


def run(planning, *rows, accepted=1, confidence=0.9):
    """A whole step; returns its accept_lens, which a device may still be computing."""
    admission = admit(planning, begin(planning, *rows), confidence)
    accept_lens = torch.full((len(rows),), accepted)
    finish(planning, admission, accept_lens)
    return accept_lens


def finish(planning, admission, accept_lens):
    """Finish a step. From a GPU SGLang then brings the outcome of the one before."""
    made = planning.finish(admission, accept_lens)
    arrive(planning)
    planning.under_way = made


def arrive(planning):
    """Bring the last outcome, as SGLang does."""
    last, planning.under_way = getattr(planning, "under_way", None), None
    if last is not None:
        last.copy_to_host(torch.clone).consume(None, [])


def state(planning):
    """The state once all outcomes have arrived."""
    arrive(planning)
    return planning.state()


def logged(planning):
    return [step.seconds for step in planning.recording.steps]
