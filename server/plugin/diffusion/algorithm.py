"""Block diffusion in SGLang's dllm mode: one forward a round, and the next state of each request's open block."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from sglang.srt.dllm.algorithm.base import DllmAlgorithm

from outrider.kernels.sampling import Rules

from ..config import PluginConfig
from ..decode.boundary import Boundary
from ..decode.metrics import SpeculationMetrics
from ..decode.sampling import Sampling
from .forward import BlockForward, OpenRows
from .policy import Policy, Static, ThresholdUnmasking, noise_keys, predict, step, steps_of

NAME = "OUTRIDER"
"""Name of the algorithm in SGLang's registry."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of a round for a request.

    kept: tokens of the request before its open block, all of which have final keys and values now.
    complete: the following blocks without masks, in order.
    open: the newest state of the next block; None: it has not been started.
    committed: the first complete block has final keys and values as well.
    """

    kept: int
    complete: list[list[int]] = field(default_factory=list)
    open: list[int] | None = None
    committed: bool = False

    @classmethod
    def of(cls, start: int, state: list[int], mask_id: int) -> Self:
        """Return the outcome of an open block at `start` with new state `state`."""
        return cls(start, open=state) if mask_id in state else cls(start, [state])


@dataclass(frozen=True, slots=True, eq=False)
class DenoisingStep:
    """states: [N, B] after it. confidence: [M] of the masked places before it, as in `policy.predict`."""

    states: torch.Tensor
    confidence: torch.Tensor


class BlockDiffusion(DllmAlgorithm):
    """The blocks of a round of SGLang's scheduler, their forward and their step; `Spiffy` makes the round of them."""

    policy: Policy

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.config = plugin = PluginConfig.from_env()
        if plugin.diffusion is None:
            raise ValueError("no block-diffusion model was named to the plugin")
        self.target = plugin.diffusion
        if plugin.unmasking == "static":
            self.policy = Static(plugin.unmasking_tokens)
        else:
            self.policy = ThresholdUnmasking(plugin.unmasking_threshold)
        self._forward: BlockForward | None = None
        self.metrics = SpeculationMetrics(1, "off")
        self.optional = Boundary(self.metrics.failures)

    def forward(self, runner: Any) -> BlockForward:
        """Return the forward, created in the first round, when weights and cache are in place."""
        if self._forward is None:
            self._forward = BlockForward(runner, self.target)
        return self._forward

    def rows(self, forward_batch: Any, reqs: Sequence[Any]) -> OpenRows:
        """Return the blocks of a batch, in order: each request's new final ones, then its open one if no final ones are
        left for later rounds."""
        block = self.block_size
        tokens = forward_batch.input_ids.long().view(-1, block)
        begins, lengths = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        starts = torch.cat([torch.arange(a, a + n, block) for a, n in zip(begins, lengths, strict=True)])
        counts = torch.tensor(lengths) // block
        before = tokens[:, -1].roll(1)
        before[counts.cumsum(0) - counts] = torch.tensor(
            [req.full_untruncated_fill_ids[a - 1] if a else 0 for req, a in zip(reqs, begins, strict=True)]
        )
        return OpenRows(
            tokens=tokens,
            starts=starts,
            before=before,
            tables=torch.repeat_interleave(forward_batch.req_pool_indices.long(), counts),
            slots=forward_batch.out_cache_loc.long().view(-1, block),
            open=(tokens == self.mask_id).any(1),
            above=torch.full_like(starts, -1),
        )

    def sampling(self, forward_batch: Any, reqs: Sequence[Any]) -> tuple[Rules, torch.Tensor]:
        """Return the rules and seeds [R] of requests."""
        seeds = torch.tensor([seed_of(req) for req in reqs], dtype=torch.int64)
        decided = torch.ones(len(reqs), dtype=torch.bool)
        return Sampling.of(forward_batch.sampling_info, seeds, decided, (True, True)).rules, seeds

    def step(
        self,
        rows: OpenRows,
        masked: torch.Tensor,
        logits: torch.Tensor,
        owner: torch.Tensor,
        sampling: tuple[Rules, torch.Tensor],
    ) -> DenoisingStep:
        """Do one step of `rows`; their masked places [N, B] have the logits [M, V]. owner: [N] int64, the request of
        each row. sampling: rules and seeds of the requests."""
        rules, seeds = sampling
        row, place = masked.nonzero(as_tuple=True)
        row_rules, steps = rules.of(owner[row]), steps_of(rows.tokens, self.mask_id)[row]
        keys = noise_keys(seeds[owner[row]], rows.starts[row] + place, steps, row_rules.temperatures)
        drawn, chances = predict(logits, row_rules, keys, self.mask_id)
        tokens, confidence = rows.tokens.clone(), torch.zeros(masked.shape)
        tokens[masked], confidence[masked] = drawn, chances
        return DenoisingStep(step(self.policy, rows.tokens, tokens, confidence, self.mask_id), chances)


def seed_of(req: Any) -> int:
    """Return the seed of a request's random numbers: its given one, or one that it keeps after a retraction."""
    given = req.sampling_params.sampling_seed
    if given is not None:
        return int(given)
    if not hasattr(req, "outrider_seed"):
        req.outrider_seed = secrets.randbits(62)
    return int(req.outrider_seed)
