"""Stage 4, verify: one forward of the target for all anchors and drafts."""

from typing import Any

from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from ..cpu.direct_forward import DirectForward, direct_forward
from ..image_tokens import rotary_positions
from ..spec_inputs import ragged_layout, verify_input
from .flatten import StepBatch


class VerifyStage:
    """The forwards of SGLang's target worker. width: gamma + 1. captures_hidden: they return hidden states."""

    captures_hidden = False

    def __init__(self, target_worker: Any, width: int) -> None:
        self.target_worker, self.width = target_worker, width
        self._size: tuple[int, int] | None = None  # of `_layout`; None: not of anchors alone
        self._direct: DirectForward | None = None
        self._direct_sought = False

    def prefill(self, scheduled: Any) -> GenerationBatchResult:
        mode = CaptureHiddenMode.FULL if self.captures_hidden else None
        return self.target_worker.forward_batch_generation(scheduled, is_verify=True, capture_hidden_mode=mode)

    def __call__(self, batch: StepBatch) -> GenerationBatchResult:
        """Return logits of all rows, and as `cap_lens` the rows [R] of each request. On a CPU in one call, if
        `direct_forward` knows the model."""
        scheduled, flat = batch.scheduled, batch.flat
        if not self._direct_sought or (self._direct is not None and not self._direct.stands):
            self._direct_sought = True
            self._direct = direct_forward(self.target_worker, self.captures_hidden)
        if self._direct is not None and not scheduled.return_hidden_states:
            output = self._direct.verify(flat, batch.seq_lens, batch.rows, scheduled.reqs)
            result = GenerationBatchResult(output, can_run_cuda_graph=False)
            result.cap_lens = batch.verify_lens + 1
        else:
            layout = self._layout_of(batch)
            scheduled.forward_mode = ForwardMode.TARGET_VERIFY
            scheduled.input_ids, scheduled.out_cache_loc = flat.input_ids, flat.slots
            positions = rotary_positions(flat, scheduled.reqs)
            scheduled.spec_info = verify_input(positions, layout, self.width, self.captures_hidden)
            result = self.target_worker.forward_batch_generation(scheduled, is_verify=True)
            result.cap_lens = layout.verify_lens
        return result

    def _layout_of(self, batch: StepBatch) -> RaggedVerifyLayout:
        """Return SGLang's description of the batch; the same one while batches have anchors alone and one size."""
        size = len(batch.verify_lens), len(batch.flat.input_ids)
        if not batch.alone or self._size != size:
            self._layout = ragged_layout(batch.flat.qo_indptr, size[1])
            self._size = size if batch.alone else None
        return self._layout
