"""SGLang on a CPU without SGLang's own CPU kernels: it then takes its plain torch paths."""

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind

from ..cpu.mapped import mapped_zeros


class OutriderCpuPlatform(CpuSRTPlatform):
    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"  # our backend is registered under this name, see register.py

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "torch_native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return True

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        if kind != "mha":
            return None
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        class CpuKVPool(MHATokenToKVPool):
            def _init_kv_copy_and_warmup(self) -> None:  # SGLang warms up a Triton kernel here
                self._kv_copy_config = None

            def _create_buffers_normal(self) -> None:
                keys, values = self._kv_buffer_shapes()
                self.k_buffer = [mapped_zeros(keys, self.store_dtype) for _ in range(self.layer_num)]
                self.v_buffer = [mapped_zeros(values, self.store_dtype) for _ in range(self.layer_num)]

        return CpuKVPool

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        class CpuAllocator(PagedTokenToKVPoolAllocator):
            free_pages: torch.Tensor

            def alloc(self, need_size: int) -> torch.Tensor | None:
                """Return slots directly where a page is one token; SGLang's arithmetic on pages is five operations."""
                if self.page_size > 1:
                    return super().alloc(need_size)
                if need_size > len(self.free_pages):
                    self.merge_and_sort_free()
                if need_size > len(self.free_pages):
                    return None
                taken, self.free_pages = self.free_pages[:need_size], self.free_pages[need_size:]
                return taken

            def alloc_extend(
                self,
                prefix_lens: torch.Tensor,
                prefix_lens_cpu: torch.Tensor,
                seq_lens: torch.Tensor,
                seq_lens_cpu: torch.Tensor,
                last_loc: torch.Tensor,
                extend_num_tokens: int,
                num_new_pages: int | None = None,
            ) -> torch.Tensor | None:
                """Skip the arithmetic where whole pages follow whole pages."""
                page = self.page_size
                if not any(n % page for lens in (prefix_lens_cpu, seq_lens_cpu) for n in lens.tolist()):
                    return self.alloc(extend_num_tokens)
                return super().alloc_extend(
                    prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages
                )

        return CpuAllocator

    def get_device(self, device_id: int = 0) -> Any:
        return torch.device("cpu")

    def get_dispatch_key_name(self) -> str:
        from ..cpu.fused_ops import DISPATCH_KEY

        return DISPATCH_KEY
