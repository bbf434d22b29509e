"""Times one draft of a drafter folder, alone on this machine; the target's weights are random."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from outrider.drafters import networks
from outrider.drafters.base import DraftBatch, Drafter, Features
from outrider.drafters.block.checkpoint import load, load_as
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.diffusion.drafter import DiffusionDrafter
from outrider.drafters.diffusion.model import DiffusionModel
from outrider.drafters.eagle import checkpoint as eagle
from outrider.drafters.eagle.drafter import EagleDrafter
from outrider.drafters.encoding import BACKLOG_EACH
from outrider.drafters.mtp import checkpoint as mtp
from outrider.drafters.mtp.drafter import MtpDrafter

CONTEXT, COMMITTED, ROUNDS = 200, 3, 15
"""Tokens of the text, tokens that the last step committed, timed drafts."""


@torch.inference_mode()
def draft_seconds(folder: Path, target: Mapping[str, Any], *, dtype: torch.dtype, gamma: int, device: str) -> float:
    """Median seconds in which a drafter reads a step's tokens and drafts `gamma` for one greedy request.

    target: the target's config; its embedding, tied to its head, is random. Raises ValueError if the folder does not
    fit.
    """
    embedding = torch.randn(target["vocab_size"], target["hidden_size"], dtype=dtype, device=device).mul_(0.1)
    drafter = _made(folder, target, embedding, gamma)
    drafter.allocate(CONTEXT + drafter.gamma + 1)
    table = torch.arange(CONTEXT + drafter.gamma + 1, dtype=torch.int32, device=device)[None]
    batch = DraftBatch(
        anchors=torch.tensor([3], device=device),
        seq_lens=torch.tensor([CONTEXT], device=device),
        page_table=table,
        rows=torch.tensor([0], device=device),
        temperatures=torch.zeros(1, device=device),
        keys=torch.ones(1, drafter.gamma, dtype=torch.int64, device=device),
        all_greedy=True,
        longest=CONTEXT + 1,
    )
    drafter.observe(_features(drafter, 0, target["hidden_size"], dtype, device))
    for _ in range(-(-CONTEXT // BACKLOG_EACH) + 2):  # encode the text, then warm up
        drafter.propose(batch)
    last, times = _features(drafter, CONTEXT - COMMITTED, target["hidden_size"], dtype, device), []
    for _ in range(ROUNDS):
        _wait(device)
        start = time.perf_counter()
        drafter.observe(last)
        drafter.propose(batch)
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times)


def _made(folder: Path, target: Mapping[str, Any], rows: torch.Tensor, gamma: int) -> Drafter:
    """Load a folder's drafter without checking which target weights it was trained for. rows: [V, d]."""
    kind, dtype, device = networks.kind_of(folder), rows.dtype, rows.device
    if kind == "eagle3":
        layers = int(target["num_hidden_layers"])
        read = partial(eagle.load, target_layers=layers, dtype=dtype, device=device)
        return EagleDrafter(read(folder), read=read, embedding=rows, head=rows, gamma=gamma)
    if kind == "mtp":
        read = partial(mtp.load, dtype=dtype, device=device)
        return MtpDrafter(read(folder), read=read, embedding=rows, head=rows, gamma=gamma)
    if kind == "diffusion":
        model = load_as(DiffusionModel, folder, dtype=dtype, device=device)
        return DiffusionDrafter(model, embedding=rows, head=rows, gamma=gamma)
    return BlockDrafter(load(folder, dtype=dtype, device=device), embedding=rows, head=rows, gamma=gamma)


def _features(drafter: Drafter, start: int, size: int, dtype: torch.dtype, device: str) -> Features:
    places = torch.arange(start, CONTEXT, device=device)
    width = size if drafter.reads_output else len(drafter.target_layers) * size
    hidden = torch.randn(len(places), width, dtype=dtype, device=device) if width else None
    return Features(hidden, torch.full_like(places, 3), places, places)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
