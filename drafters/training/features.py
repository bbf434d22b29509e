"""Stage 2: one target pass over every answer, keeping layer outputs and the likeliest tokens.

Storing the top K tokens with their probabilities once replaces a full-vocabulary product per drafted position and
epoch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tqdm import tqdm

from .deadline import NEVER, Deadline
from .prompts import Sample
from .store import FeatureStore, Sequence
from .target import TargetModel

LOGIT_ROWS = 256
"""Positions whose logits over the whole vocabulary are in memory at once."""


@torch.inference_mode()
def sequence_features(
    target: TargetModel, batch: list[tuple[list[int], int]], layers: tuple[int, ...], top: int
) -> list[Sequence]:
    """Features of (tokens, prompt length) pairs, padded on the right and run together; on the CPU.

    The distribution of answer token i comes from position i - 1, so logits are computed from the last prompt token on.
    """
    width = max(len(ids) for ids, _ in batch)
    padded = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch], device=target.device)
    with target.layer_outputs(layers) as out:
        final = target.model.model(input_ids=padded, use_cache=False).last_hidden_state
    features = torch.cat([out[i] for i in layers], -1) if layers else final[..., :0]
    sequences = []
    for row, (ids, prompt) in enumerate(batch):
        likeliest = [_likeliest(part, target, top) for part in final[row, prompt - 1 : len(ids) - 1].split(LOGIT_ROWS)]
        top_ids, probs = (torch.cat(parts) for parts in zip(*likeliest, strict=True))
        kept = features[row, : len(ids)].cpu()
        sequences.append(Sequence(torch.tensor(ids), prompt, kept, top_ids, probs))
    return sequences


def _likeliest(states: torch.Tensor, target: TargetModel, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens [R, top] behind final states [R, d], and their probabilities; on the CPU."""
    logits = states @ target.head.T
    values, ids = logits.topk(top, -1)
    return ids.cpu(), (values.float() - logits.float().logsumexp(-1, keepdim=True)).exp().cpu()


@torch.inference_mode()
def answer_chances(target: TargetModel, tokens: list[int], prompt: int, temperature: float) -> torch.Tensor:
    """The target's probability [S - prompt] of every answer token at a temperature, given the tokens before it."""
    ids = torch.tensor([tokens], device=target.device)
    rows = target.model.model(input_ids=ids, use_cache=False).last_hidden_state[0, prompt - 1 : -1]
    logits = (rows @ target.head.T).float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, prompt:, None])[:, 0].exp()


def usable(tokens: int, prompt: int) -> bool:
    """True if a sequence has an anchor: an answer's token with a token behind it."""
    return tokens >= prompt + 2


def build_store(
    target: TargetModel,
    samples: Iterable[Sample],
    store: FeatureStore,
    *,
    layers: tuple[int, ...],
    top: int,
    max_tokens: int = 1024,
    batch_tokens: int = 4096,
    deadline: Deadline = NEVER,
) -> None:
    """Add every answered sample to `store` that is not in it yet; raises OutOfTime at the deadline."""
    missing: list[tuple[list[int], int, Sample]] = []
    for sample in samples:
        prompt = target.chat_ids(list(sample.turns))
        ids = (prompt + list(sample.response_ids))[:max_tokens]
        if usable(len(ids), len(prompt)) and ids not in store:
            missing.append((ids, len(prompt), sample))
    progress = tqdm(total=sum(len(ids) for ids, _, _ in missing), desc="features", unit="tok", unit_scale=True)
    pending: list[tuple[list[int], int, Sample]] = []
    for item in [*missing, None]:
        full = item is None or (len(pending) + 1) * max(len(x[0]) for x in [*pending, item]) > batch_tokens
        if pending and full:
            made = sequence_features(target, [(ids, prompt) for ids, prompt, _ in pending], layers, top)
            for sequence, (ids, _, sample) in zip(made, pending, strict=True):
                store.append(sequence, temperature=sample.temperature, source=sample.source)
                progress.update(len(ids))
            pending = []
            deadline.check()
        if item is not None:
            pending.append(item)
    progress.close()
