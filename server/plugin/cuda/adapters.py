"""LoRA adapters on a GPU: SGLang's Triton kernels, for requests that verify different numbers of tokens.

SGLang gives every request of a verification gamma + 1 rows. Its kernels read the bounds of requests from the device, in
graphs too, so we write our lengths there, which only the device knows.
"""

from typing import Any

import torch
from sglang.srt.lora.backend.triton_backend import TritonLoRABackend


class RaggedLoRABackend(TritonLoRABackend):
    def prepare_lora_batch(self, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        super().prepare_lora_batch(forward_batch, *args, **kwargs)
        if not forward_batch.forward_mode.is_target_verify() or forward_batch.spec_info is None:
            return  # None: dummies of gamma + 1 rows each
        batch, lens = self.batch_info, forward_batch.spec_info.ragged_verify_layout.verify_lens
        batch.seg_lens[: len(lens)].copy_(lens)
        batch.seg_lens[len(lens) :].zero_()  # a graph has more slots
        torch.cumsum(batch.seg_lens, dim=0, out=batch.seg_indptr[1:])
        batch.expected_tokens = len(forward_batch.input_ids)
