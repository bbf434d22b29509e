"""Part A, every Triton kernel but attention beside its torch reference, which runs on the host.

What is a number of bits, a length or a token must be the same. Probabilities come from exponentials that round
differently, so they may differ by what float32 holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import batches as random_batches
import torch

from outrider.drafters.base import DraftBatch
from outrider.drafters.block.heads import MarkovHead
from outrider.drafters.block.sampling import sample_block, sample_parallel
from outrider.kernels.acceptance import reference_accept
from outrider.kernels.cuda import acceptance, admission, noise, ragged, rules
from outrider.kernels.drafts import torch_admit
from outrider.kernels.noise import (
    Purpose,
    torch_exponentials,
    torch_gumbel_argmax,
    torch_numbers,
    torch_streams,
    torch_uniforms,
)
from outrider.kernels.ragged import torch_commit, torch_flatten_bucket
from outrider.kernels.sampling import Rules, reference_target_probs

from .device import Device
from .report import Measured

FAR = 1e-4
"""Total variation of two distributions that differ by rounding; filters of 150 thousand tokens add up float32."""
DEVIATIONS = 5.5
"""Standard deviations that no count may be off: of some hundred counts one is, once in a hundred thousand runs."""


def moved(x: Any, device: torch.device) -> Any:
    """Tensors of tuples and dictionaries on the device, strides kept."""
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
    if isinstance(x, dict):
        return {key: moved(value, device) for key, value in x.items()}
    if isinstance(x, Rules):
        return Rules(*(moved(value, device) for value in x))
    if isinstance(x, tuple | list):
        return [moved(value, device) for value in x]
    return x


def differing(found: Any, expected: Any) -> int:
    """Elements that are not equal, of two tensors or of two rows of tensors."""
    if isinstance(expected, torch.Tensor):
        return int((found.cpu() != expected.cpu()).sum())
    return sum(differing(one, other) for one, other in zip(found, expected, strict=True))


def same(what: str, found: Any, expected: Any) -> Measured:
    return Measured(what, differing(found, expected), "differ", at_most=0)


def bits(device: Device) -> Iterator[Measured]:
    """Noise, keys and numbers have the bits that they have on a CPU."""
    generator = torch.Generator().manual_seed(0)
    count, width = (8, 300) if device.tiny else (64, 151_936)
    keys = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    positions = torch.arange(count)
    on = moved(keys, device.on)
    yield same("noise of tokens", probes.exponentials(on, width), torch_exponentials(keys, torch.arange(width)))
    for purpose in Purpose:
        found = noise.streams(on, positions.to(device.on), int(purpose))
        yield same(f"keys for {purpose.name.lower()}", found, torch_streams(keys, positions, purpose))
    yield same("keys of a block", noise.substreams(on, 15), torch_numbers(keys, 15))
    yield same("uniform numbers", noise.uniforms(on, 15), torch_uniforms(keys, 15))
    for tokens in (None, torch.randperm(200_000, generator=generator)[:width].sort().values):
        weights = torch.rand(count, width, generator=generator) ** 8
        weights[0] = 0
        found = noise.gumbel_argmax(*moved((weights, keys, tokens), device.on))
        what = "tokens drawn" if tokens is None else "tokens drawn of a part of the vocabulary"
        yield same(what, found, torch_gumbel_argmax(weights, keys, tokens))


def lengths(device: Device) -> Iterator[Measured]:
    """Survival and top-K, flattening and commit."""
    for requests, gamma in ((1, 1), (5, 7)) if device.tiny else ((1, 1), (5, 7), (64, 7), (256, 7), (300, 15)):
        shape = f"{requests} × {gamma}"
        for hurried in (False, True):
            confidence, lens, first = random_batches.admission(requests, gamma, requests, hurried=hurried)
            bounds = 0.3 / torch.linspace(1.0, 0.5, gamma) if hurried else None
            arguments = confidence, lens, torch.tensor([requests * gamma // 2])
            found = admission.admit(*moved((*arguments, bounds, first), device.on))
            expected = torch_admit(*arguments, bounds=bounds, first=first)
            yield same(f"admitted{', bounded, some first' if hurried else ''}, {shape}", found, expected)
        batch = random_batches.flattening(requests, gamma, requests)
        for padding in (0, 300):
            tier = int((batch[2] + 1).sum()) + padding
            flat = torch_flatten_bucket(*batch, tier)
            found = ragged.flatten(*moved(batch, device.on), tier)
            yield same(f"flattened, {shape}, {padding} of padding", found, flat)
        kept = (torch.rand(requests, generator=torch.Generator().manual_seed(1)) * (batch[2] + 1)).long() + 1
        given = kept, torch.arange(requests * (gamma + 1)).view(requests, -1), batch[3], *flat[4:], flat[2]
        yield same(f"committed, {shape}", ragged.commit(*moved(given, device.on)), torch_commit(*given))


def distributions(device: Device) -> Iterator[Measured]:
    """p from four numbers of a row, by all sampling rules."""
    for dtype in device.types:
        for rows, width in ((4, 1025),) if device.tiny else ((32, 1025), (32, 151_936)):
            generator = torch.Generator().manual_seed(width)
            logits = (torch.randn(rows, width, generator=generator) * 3).to(dtype)
            logits[torch.rand(rows, width, generator=generator) < 0.2] = -torch.inf
            given = random_batches.some_rules(rows, width, generator)
            on, on_rules = moved((logits, given), device.on)
            found = rules.statistics(on, *on_rules)
            random = given.temperatures > 0
            said = probes.probabilities(on, on_rules.temperatures, found).cpu()[random].double()
            far = (said - reference_target_probs(logits, *given)[random].double()).abs().sum(1) / 2
            yield Measured(f"{name(dtype)} [{rows}, {width}]", float(far.max()), "total variation", at_most=FAR)
            yield same(f"best of {name(dtype)} [{rows}, {width}]", found.best.long(), logits.float().argmax(1))


def acceptances(device: Device) -> Iterator[Measured]:
    """Accepted lengths and tokens of greedy, sampled and seeded requests."""
    shapes = [(3, 4, 24, "full"), (3, 1, 60, "truncated"), (4, 2, 24, "point mass")]
    if not device.tiny:
        shapes += [(12, 7, 151_936, "full"), (3, 15, 32_000, "truncated"), (300, 7, 2000, "full")]
        shapes += [(64, 15, 9000, "point mass")]
    for dtype in device.types:
        for requests, gamma, width, q_kind in shapes:
            arrays, keywords = random_batches.verification(requests, gamma, width, q_kind, dtype, requests)
            found = accept(moved(arrays, device.on), moved(keywords, device.on))
            what = f"{name(dtype)}, {requests} × {gamma}, {width} tokens, q {q_kind}"
            yield same(what, found, referred(arrays, keywords))


def accept(arrays: Any, keywords: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator, with padding that must not be read."""
    *others, logits, given = arrays
    logits[int(arrays[2][-1]) :] = torch.nan
    order = ("uniforms", "final_keys", "row_keys", "decided", "draft_probs", "vocab")
    return acceptance.accept(*others, logits, *given, *(keywords[name] for name in order))


def referred(arrays: Any, keywords: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What acceptance means, one token at a time."""
    tokens, verify_lens, qo_indptr, request, logits, given = arrays
    probs = reference_target_probs(logits, *given.of(request))
    others = {key: value for key, value in keywords.items() if key not in ("row_keys", "decided")}
    decided = keywords["decided"] | (given.temperatures <= 0)
    wanted = torch_gumbel_argmax(probs.nan_to_num(1.0), keywords["row_keys"])
    arrays = tokens, verify_lens, qo_indptr
    return reference_accept(*arrays, wanted=wanted, probs=probs, decided=decided, **others)


def law(device: Device) -> Iterator[Measured]:
    """Tokens that come out are distributed as p, whatever q is: counted, in standard deviations."""
    requests, width, gamma = 40 if device.tiny else 200_000, 4, 2
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(width, width, generator=generator) ** 2 + 0.02 for _ in range(2))  # after token x: row x
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    anchors = torch.zeros(requests).long()
    first = torch.multinomial(q[anchors], 1, generator=generator)
    second = torch.multinomial(q[first[:, 0]], 1, generator=generator)
    tokens = torch.cat([first, second], 1)
    before = torch.cat([anchors[:, None], tokens], 1)
    keys = torch.randint(2**62, (2, requests), generator=generator)
    arrays = (
        tokens, torch.full((requests,), gamma), torch.arange(requests + 1) * (gamma + 1),
        torch.arange(requests).repeat_interleave(gamma + 1), p[before.flatten()].log(), Rules(torch.ones(requests)),
    )  # fmt: skip
    on, (uniform_keys, final_keys) = moved(arrays, device.on), moved(keys, device.on)
    lens, out = accept(
        on,
        {
            "uniforms": noise.uniforms(uniform_keys, gamma), "final_keys": final_keys, "row_keys": None, "vocab": None,
            "decided": torch.zeros(requests, dtype=torch.bool, device=device.on),
            "draft_probs": q[before[:, :gamma]].to(device.on),
        },
    )  # fmt: skip
    lens, out = lens.cpu(), out.cpu()
    yield Measured("first tokens", _deviations(out[:, 0], p[0]), "σ", at_most=DEVIATIONS)
    for x in range(width):
        after = (lens > 1) & (out[:, 0] == x)
        yield Measured(f"tokens after {x}", _deviations(out[after, 1], p[x]), "σ", at_most=DEVIATIONS)
    yield Measured("accepted", float((lens - 1).float().mean()) / gamma, "of drafts")


def _deviations(tokens: torch.Tensor, p: torch.Tensor) -> float:
    """The largest difference of a count from what is expected, in standard deviations."""
    counts, n = torch.bincount(tokens, minlength=len(p)), len(tokens)
    return float(((counts - n * p) / (n * p * (1 - p)).sqrt()).abs().max())


class _Shape:
    """What `MarkovHead` reads of a drafter's config."""

    def __init__(self, width: int):
        self.vocab_size = self.logit_size = width
        self.markov_rank, self.hidden_size = 64, 32


def drafts(device: Device) -> Iterator[Measured]:
    """A block's tokens, q and confidences, with and without the sequential head."""
    requests, gamma, width = (3, 2, 300) if device.tiny else (24, 7, 32_000)
    for dtype in device.types:
        for head in (False, True):
            torch.manual_seed(0)
            generator = torch.Generator().manual_seed(1)
            given = random_batches.some_rules(requests, width, generator)
            markov = MarkovHead(_Shape(width)).to(dtype).requires_grad_(False)  # type: ignore[arg-type]
            markov.w2.weight *= 20
            anchors = torch.randint(width, (requests,), generator=generator)
            keys = torch.randint(2**62, (requests, gamma), generator=generator)
            logits = (torch.randn(requests, gamma, width, generator=generator) * 3).to(dtype)
            hidden = torch.zeros(requests, gamma, 32, dtype=dtype)
            what = f"{name(dtype)}{', sequential' if head else ''}"
            yield from _draft(device, what, markov if head else None, anchors, keys, logits, hidden, given)


def _draft(
    device: Device,
    what: str,
    markov: MarkovHead | None,
    anchors: torch.Tensor,
    keys: torch.Tensor,
    logits: torch.Tensor,
    hidden: torch.Tensor,
    given: Rules,
) -> Iterator[Measured]:
    """The reference draws each token after those of the kernel, so that one that differs changes no other."""
    on = device.on
    rows = torch.zeros(len(anchors), device=on).long()
    empty = torch.zeros(1, 1, dtype=torch.int32, device=on)
    moved_rules = moved(given, on)._asdict()
    batch = DraftBatch(anchors.to(on), rows, empty, rows, keys=keys.to(on), **moved_rules)
    with device.triton():
        if markov is None:
            tokens, q, sure = sample_parallel(logits.to(on), batch, vocab=None)
        else:
            tokens, q, sure = sample_block(
                logits.to(on), hidden.to(on), batch, vocab=None, markov=markov.to(on), confidence=None
            )
    assert q is not None
    tokens, q, sure = tokens.cpu(), q.cpu(), sure.cpu()
    random, wrong, far, unsure = given.temperatures > 0, 0, 0.0, 0.0
    for k in range(logits.shape[1]):
        row = logits[:, k].float()
        if markov is not None:
            latent = markov.to("cpu").w1(anchors if k == 0 else tokens[:, k - 1])
            row = row + latent.float() @ markov.w2.weight.float().T
        expected = reference_target_probs(row, *given)
        wanted = torch_gumbel_argmax(expected, keys[:, k])
        wrong += differing(tokens[:, k], wanted)
        far = max(far, float((q[random, k] - expected[random]).abs().sum(1).max()) / 2)
        most = torch.where(random, expected.amax(1), row.softmax(1).amax(1))
        unsure = max(unsure, float((sure[:, k] - most).abs().max()))
    yield Measured(f"tokens, {what}", wrong, "differ", at_most=0)
    yield Measured(f"q, {what}", far, "total variation", at_most=FAR)
    yield Measured(f"confidence, {what}", unsure, "off", at_most=FAR)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
