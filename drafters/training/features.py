"""Stage 2: one target pass over every answer, keeping layer outputs and the likeliest tokens.

Storing the top K tokens with their probabilities once replaces a full-vocabulary product per drafted position and
epoch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from .deadline import NEVER, Deadline
from .prompts import AnsweredPrompt
from .store import FeatureStore, Sequence
from .target import TargetModel, outputs_of

BATCH_TOKENS = 2048
"""Tokens that the target reads at a time, padding included; a longer text goes in alone."""
PART_TOKENS = 4 * BATCH_TOKENS
"""Tokens with features in memory at once, to be stored in the order of their texts."""
LOGIT_ROWS = 256
"""Positions with logits over the whole vocabulary in memory at once."""


@torch.inference_mode()
def sequence_features(
    target: TargetModel, batch: list[tuple[list[int], int]], layers: tuple[int, ...], top: int
) -> list[Sequence]:
    """Return features of (tokens, prompt length) pairs, padded on the right and run together; on the CPU. The
    distribution of answer token i comes from position i - 1, so logits are computed from the last prompt token on."""
    width = max(len(ids) for ids, _ in batch)
    padded = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch], device=target.device)
    with outputs_of({i: target.model.model.layers[i] for i in layers}) as out:
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
    """Return the likeliest next tokens [R, top] of final states [R, d], and their probabilities; on the CPU."""
    logits = states @ target.head.T
    values, ids = logits.topk(top, -1)
    return ids.cpu(), (values.float() - logits.float().logsumexp(-1, keepdim=True)).exp().cpu()


@torch.inference_mode()
def answer_chances(target: TargetModel, tokens: list[int], prompt: int, temperature: float) -> torch.Tensor:
    """Return the target's probability [S - prompt] of every answer token at a temperature, given the tokens before
    it."""
    ids = torch.tensor([tokens], device=target.device)
    rows = target.model.model(input_ids=ids, use_cache=False).last_hidden_state[0, prompt - 1 : -1]
    logits = (rows @ target.head.T).float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, prompt:, None])[:, 0].exp()


def usable(tokens: int, prompt: int) -> bool:
    """Return True if a sequence has an anchor: an answer token followed by a token."""
    return tokens >= prompt + 2


def read_texts(
    target: TargetModel, texts: list[tuple[list[int], int]], layers: tuple[int, ...], top: int
) -> Iterator[dict[int, Sequence]]:
    """Let the target read (tokens, prompt length) pairs, texts of similar length together. Yields batches: the features
    of each text by its number."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number][0]))
    while order:
        batch = [order.pop(0)]
        while order and (len(batch) + 1) * len(texts[order[0]][0]) <= BATCH_TOKENS:
            batch.append(order.pop(0))
        made = sequence_features(target, [texts[number] for number in batch], layers, top)
        yield dict(zip(batch, made, strict=True))


@dataclass(frozen=True, slots=True)
class AnsweredText:
    """A prompt of `prompt` tokens with its answer, and the facts that a store keeps of it."""

    tokens: list[int]
    prompt: int
    temperature: float
    source: str


def sample_texts(target: TargetModel, samples: Iterable[AnsweredPrompt]) -> Iterator[AnsweredText]:
    """Yield the answered samples as chats of the target."""
    for sample in samples:
        prompt = target.chat_ids(list(sample.turns))
        yield AnsweredText(prompt + list(sample.response_ids), len(prompt), sample.temperature, sample.source)


def build_store(
    target: TargetModel,
    texts: Iterable[AnsweredText],
    store: FeatureStore,
    *,
    layers: tuple[int, ...],
    top: int,
    max_tokens: int = 1024,
    deadline: Deadline = NEVER,
    keep: Callable[[AnsweredText, Sequence], bool] = lambda text, sequence: True,
) -> int:
    """Add every text to `store` that is not in it yet, in their order and as they come; raises OutOfTime at the
    deadline. keep: decides on each text that has been read. Returns the number of texts that were not kept."""
    cut = (replace(text, tokens=text.tokens[:max_tokens]) for text in texts)
    missing = (text for text in cut if usable(len(text.tokens), text.prompt) and text.tokens not in store)
    progress = tqdm(desc="features", unit="tok", unit_scale=True)
    left_out = 0
    for part in _parts(missing):
        made: dict[int, Sequence] = {}
        for batch in read_texts(target, [(text.tokens, text.prompt) for text in part], layers, top):
            made |= batch
            progress.update(sum(len(sequence.tokens) for sequence in batch.values()))
        for number, text in enumerate(part):
            if keep(text, made[number]):
                store.append(made[number], temperature=text.temperature, source=text.source)
            else:
                left_out += 1
        deadline.check()
    progress.close()
    return left_out


def _parts(texts: Iterable[AnsweredText]) -> Iterator[list[AnsweredText]]:
    """Yield consecutive texts of about `PART_TOKENS` tokens."""
    part: list[AnsweredText] = []
    for text in texts:
        part.append(text)
        if sum(len(each.tokens) for each in part) >= PART_TOKENS:
            yield part
            part = []
    if part:
        yield part
