"""Our speculation as SGLang sees it: an algorithm named OUTRIDER on its second-generation worker schema."""

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

NAME = "OUTRIDER"


class OutriderAlgorithm(CustomSpecAlgo):
    """Draft state is kept apart from SGLang's pools (indexed by its KV slots), so SGLang sees no draft model and no
    draft KV."""

    def has_draft_kv(self) -> bool:
        return False

    def supports_ragged_verify(self) -> bool:
        return True

    def build_disagg_draft_input(self, batch: Any, last_tokens: Any, future_map: Any) -> Any:
        """Return the state of requests with prompts read by another server; last_tokens: [R], the first of their
        answers."""
        from sglang.srt.managers.overlap_utils import RelayPayload

        from ..spec_inputs import StepState

        state = StepState(last_tokens, batch.seq_lens)
        if batch.enable_overlap:
            state.future_indices = batch.req_pool_indices
            future_map.publish(state.future_indices, batch.seq_lens)
            future_map.stash(state.future_indices, RelayPayload(bonus_tokens=last_tokens))
        return state

    def create_future_map(self, device: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # SGLang calls a few more methods than CustomSpecAlgo defines, different ones per version. Its n-gram algorithm,
        # which has no draft model either, gives the right answers.
        if name.startswith("__"):
            raise AttributeError(name)
        method = getattr(SpeculativeAlgorithm, name)
        return lambda *args, **kwargs: method(SpeculativeAlgorithm.NGRAM, *args, **kwargs)
