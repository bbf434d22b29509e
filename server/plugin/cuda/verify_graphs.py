"""A graph of the target's verification for every bucket, by SGLang's runner of decode graphs.

SGLang captures ragged verification for numbers of tokens that are multiples of gamma + 1, and gives a graph as many
slots as there may be requests. Here the numbers are the planners' buckets, and a graph has one more slot, for padding
(see `TokenBuckets.slots`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens

from outrider.drafters import registry

from ..attention_backends import buckets_of
from ..config import PluginConfig
from ..spec_inputs import verify_input


class VerifyGraphRunner(DecodeCudaGraphRunner):
    """Captures graphs for a runner of the target that has buckets (`buckets_of`)."""

    captured_req_width: int
    capture_bs: list[int]

    def _build_ragged_verify_token_buckets(self) -> list[int]:
        """Return the buckets. SGLang calls this after choosing its own sizes and before allocating buffers."""
        buckets = buckets_of(self.model_runner, self.captured_req_width)
        if buckets is None:
            raise ValueError("graphs of a verification are for backends whose steps have buckets")
        self.buckets = buckets
        self.max_bs = buckets.slots(buckets.graphs[-1])
        self.capture_bs = [self.max_bs]
        return list(buckets.graphs)

    def _autotune_buffers(self) -> tuple[Any, int]:
        """Return the buffers, and how many requests of gamma + 1 tokens they hold."""
        return self.buffers, self.buckets.captured

    def _ragged_capture_slots(self, num_tokens: int) -> int:
        return self.buckets.slots(num_tokens)

    def _can_run_ragged_verify_graph(self, forward_batch: Any, ragged_layout: Any) -> bool:
        fits = self.buckets.has_graph(forward_batch.batch_size, ragged_layout.graph_num_tokens)
        return fits and super()._can_run_ragged_verify_graph(forward_batch, ragged_layout)

    def _capture_one_stream(self, stream_idx: int | None = None) -> None:
        with self._counting_tokens():
            super()._capture_one_stream(stream_idx)

    @contextmanager
    def _counting_tokens(self) -> Iterator[None]:
        """A context in which SGLang's loop over numbers of requests (gamma + 1 tokens each) runs over tokens."""
        sizes, width = self.capture_bs, self.captured_req_width
        self.capture_bs, self.captured_req_width = list(self.buckets.graphs), 1
        try:
            yield
        finally:
            self.capture_bs, self.captured_req_width = sizes, width

    def get_spec_info(self, num_tokens: int) -> Any:
        """Return the input to capture a graph of num_tokens tokens. SGLang has it for its own algorithms only."""
        lens = build_capture_verify_lens(
            num_tokens=num_tokens, num_slots=self.buckets.slots(num_tokens), num_draft_tokens=self.buckets.width
        )
        layout = RaggedVerifyLayout.from_verify_lens(
            verify_lens_cpu=lens, device=self.device, grid=self.capture_num_tokens
        )
        self._captured_ragged_layouts[num_tokens] = layout  # SGLang refreshes it for every replay
        return verify_input(self.buffers.positions[:num_tokens], layout, self.buckets.width, shows_hidden_states())


def shows_hidden_states() -> bool:
    """Return True if the drafter reads hidden states of the target."""
    name = PluginConfig.from_env().drafter
    return name != "off" and registry.find(name).reads_states
