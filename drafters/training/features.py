"""Stage 2: one target pass over every answer, keeping layer outputs and the likeliest tokens.

Storing the top K tokens with their probabilities once replaces a full-vocabulary product per drafted position and
epoch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

import torch
from tqdm import tqdm
from transformers.cache_utils import Cache, DynamicLayer

from .deadline import NEVER, Deadline
from .prompts import AnsweredPrompt
from .store import FeatureStore, Sequence
from .target import TargetModel, outputs_of

BATCH_TOKENS = 2048
"""Tokens that the target reads at a time, padding included; a longer text goes in alone."""
PART_TEXTS = 16
"""Texts with features in memory at once, to be stored in their order."""
LOGIT_ROWS = 256
"""Positions with logits over the whole vocabulary in memory at once."""


@torch.inference_mode()
def sequence_features(
    target: TargetModel, batch: list[tuple[list[int], int]], layers: tuple[int, ...], top: int
) -> list[Sequence]:
    """Return features of (tokens, prompt length) pairs, padded on the right and run together; on the CPU. Tokens that
    all begin with are read once. The distribution of answer token i comes from position i - 1, so logits are computed
    from the last prompt token on."""
    shared, width = shared_tokens(target, batch), max(len(ids) for ids, _ in batch)
    padded = torch.tensor([ids[shared:] + [0] * (width - len(ids)) for ids, _ in batch], device=target.device)
    cache, features = Cache(layer_class_to_replicate=SharedLayer) if shared else None, []
    with outputs_of({i: target.model.model.layers[i] for i in layers}) as out:
        for part in [padded.new_tensor([batch[0][0][:shared]]), padded] if shared else [padded]:
            outputs = target.model.model(input_ids=part, past_key_values=cache, use_cache=cache is not None)
            final = outputs.last_hidden_state
            features.append(torch.cat([out[i] for i in layers], -1) if layers else final[..., :0])
    sequences = []
    for row, (ids, prompt) in enumerate(batch):
        rows = final[row, prompt - 1 - shared : len(ids) - 1 - shared]
        likeliest = [_likeliest(part, target, top) for part in rows.split(LOGIT_ROWS)]
        top_ids, probs = (torch.cat(parts) for parts in zip(*likeliest, strict=True))
        kept = torch.cat([*(first[0] for first in features[:-1]), features[-1][row, : len(ids) - shared]]).cpu()
        sequences.append(Sequence(torch.tensor(ids), prompt, kept, top_ids, probs))
    return sequences


class SharedLayer(DynamicLayer):
    """A layer's keys and values of tokens that all rows begin with, kept once."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            return super().update(key_states, value_states)
        kept: tuple[Any, Any] = self.keys, self.values
        states = zip(kept, (key_states, value_states), strict=True)
        keys, values = (torch.cat([first.expand(len(new), -1, -1, -1), new], -2) for first, new in states)
        return keys, values


def shared_tokens(target: TargetModel, texts: list[tuple[list[int], int]]) -> int:
    """Return how many tokens all texts begin with, within their prompts; 0 where a layer keeps a recurrent state."""
    kinds = set(getattr(target.config, "layer_types", None) or ())
    if len(texts) == 1 or kinds - {"full_attention", "sliding_attention", "chunked_attention"}:
        return 0
    columns = zip(*(ids[: prompt - 1] for ids, prompt in texts), strict=False)
    return len(list(takewhile(lambda tokens: len({*tokens}) == 1, columns)))


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
    order, shared = sorted(range(len(texts)), key=lambda number: len(texts[number][0])), shared_tokens(target, texts)
    while order:
        batch = [order.pop(0)]
        while order and (len(batch) + 1) * (len(texts[order[0]][0]) - shared) <= BATCH_TOKENS:
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
    while part := list(islice(missing, PART_TEXTS)):
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
