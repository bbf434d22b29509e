"""SGLang's runner of decode graphs with our changes, on a CPU.

Its graph backend is replaced by one that calls the captured function again for a replay, on the same buffers. The
attention backend plans by the functions of SGLang's fa3, and computes with our kernel. The rest is SGLang's. Prints
JSON.
"""

import json
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from graphs_as_functions import Graphs

from outrider.server.plugin import activate

os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"
activate()
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # noqa: E402  after the plugin
from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput  # noqa: E402
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as sglang_runner  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative.ragged_verify import build_ragged_target_verify_geometry  # noqa: E402

from outrider.drafters.base import Draft  # noqa: E402
from outrider.kernels import acceptance  # noqa: E402
from outrider.kernels.acceptance import Verification, with_point_masses  # noqa: E402
from outrider.kernels.attention import flat_attention  # noqa: E402
from outrider.kernels.flat_batch import FlatBatch  # noqa: E402
from outrider.kernels.ragged import commit  # noqa: E402
from outrider.kernels.sampling import Rules  # noqa: E402
from outrider.scheduler.buckets import TokenBuckets  # noqa: E402
from outrider.server.plugin.config import PluginConfig  # noqa: E402
from outrider.server.plugin.cuda import verify_graphs  # noqa: E402
from outrider.server.plugin.decode.flatten import flatten  # noqa: E402
from outrider.server.plugin.decode.sampling import Sampling  # noqa: E402
from outrider.server.plugin.decode.verify_tail import VerifyTail  # noqa: E402
from outrider.server.plugin.hooks.algorithm import OutriderAlgorithm  # noqa: E402
from outrider.server.plugin.spec_inputs import ragged_layout, verify_input  # noqa: E402

REQUESTS, CAPTURED, WIDTH, CONTEXT, VOCAB, SIZE = 7, 5, 4, 64, 40, 16
BUCKETS = TokenBuckets(REQUESTS, WIDTH, CAPTURED)
ARGUMENTS = ServerArgs(model_path="dummy", device="cpu")
NOBODYS = 1e6
"""Fills unused slots of the cache."""


class Attention(AttentionBackend):
    """Plans as `FlashAttentionBackend` for a verification: lengths padded to the graph's slots, in its buffers."""

    supports_ragged_verify_graph = True

    def __init__(self, page_table: torch.Tensor):
        self.page_table = page_table
        self.cache = torch.full((page_table.numel() + 1, 1, SIZE), NOBODYS)
        self.cache[0] = 0.0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.most = max_bs, max_num_tokens
        self.kv_lens = torch.zeros(max_bs, dtype=torch.int32)
        self.qo_indptr = torch.zeros(max_bs + 1, dtype=torch.int32)
        self.rows = torch.zeros(max_bs, dtype=torch.int64)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        slots = batch.batch_size
        layout = batch.spec_info.ragged_verify_layout.padded_to_bucket(padded_bs=slots)
        geometry = build_ragged_target_verify_geometry(seq_lens=batch.seq_lens, layout=layout)
        self.kv_lens[:slots].copy_(geometry.cache_seqlens_int32)
        self.qo_indptr[: slots + 1].copy_(geometry.cu_seqlens_q)
        self.rows[:slots].copy_(batch.req_pool_indices)

    def attend(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
        slots = batch.batch_size
        self.cache[batch.out_cache_loc] = x[:, None]
        flat = FlatBatch(
            self.qo_indptr[: slots + 1], self.kv_lens[:slots], self.rows[:slots], self.page_table, WIDTH, CONTEXT
        )
        return flat_attention(x[:, None], self.cache, self.cache, flat, scale=0.3)[:, 0]


class Model(torch.nn.Module):
    shared_experts_config = None

    def __init__(self, attention: Attention):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB, SIZE, generator=draw)
        self.places = torch.randn(2 * CONTEXT, SIZE, generator=draw)
        self.attention = attention

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> LogitsProcessorOutput:
        hidden = self.attention.attend(self.embedding[input_ids] + self.places[positions], batch)
        shown = hidden if batch.capture_hidden_mode is CaptureHiddenMode.FULL else None
        return LogitsProcessorOutput(hidden @ self.embedding.T, hidden_states=shown)


def as_on_a_device(capture: Any) -> Any:
    """Acceptance without the CPU kernels, whose operations depend on numbers."""

    def run(*arguments: Any) -> None:
        with mock.patch.object(acceptance, "native", SimpleNamespace(fits=lambda *_: False)):
            capture(*arguments)

    return run


def model_runner() -> Any:
    page_table = torch.zeros(REQUESTS + 1, CONTEXT, dtype=torch.int32)  # row 0 is unused, as in SGLang
    page_table[1:] = 1 + torch.randperm(REQUESTS * CONTEXT).view(-1, CONTEXT)
    attention = Attention(page_table)
    runner = SimpleNamespace(
        device="cpu", attn_backend=attention, model=Model(attention), capture_head_hooks=[],
        spec_algorithm=OutriderAlgorithm("OUTRIDER", lambda _: None, supports_overlap=True),
        is_draft_worker=False, lora_manager=None,
        ngram_embedding_manager=SimpleNamespace(enabled=False), hisparse_coordinator=None, canary_manager=None,
        server_args=ARGUMENTS, dtype=torch.float32, device_timer=None,
        model_config=SimpleNamespace(
            hidden_size=SIZE, vocab_size=VOCAB, dtype=torch.float32, is_encoder_decoder=False,
            hf_config=SimpleNamespace(architectures=["Tiny"]), hf_text_config=SimpleNamespace(model_type="tiny"),
        ),
        req_to_token_pool=SimpleNamespace(size=REQUESTS, req_to_token=page_table), capture_tail_hooks=[],
        decode_num_tokens_per_req=lambda num_draft_tokens=None: WIDTH, attn_tp_sequence_sharded=lambda tokens: False,
        get_pp_proxy_topk_size=lambda: None, get_pp_proxy_residual_num_blocks=lambda: None,
        get_pp_proxy_dspark_hidden_size=lambda: 0, get_aux_hidden_states_width=lambda: 0,
        kv_index_translator=SimpleNamespace(bind_runner_slots=lambda _: None), shared_read_done_event=None, gpu_id=0,
    )  # fmt: skip
    runner.kept = torch.zeros(len(attention.cache), dtype=torch.int64)  # tokens by slot, as the worker remembers them

    def observe(
        hidden: torch.Tensor | None, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        assert (hidden is not None) == verify_graphs.shows_hidden_states()
        runner.kept[slots] = tokens

    runner.room = None
    if verify_graphs.shows_hidden_states():
        runner.room = torch.full((REQUESTS, WIDTH - 1, VOCAB), torch.nan), None
    runner.tail = VerifyTail(BUCKETS, observe, "cpu", runner.room)
    runner.capture_tail_hooks.append(as_on_a_device(runner.tail.capture))
    runner.graph_shared_output = GraphSharedOutput(device=torch.device("cpu"), max_rows=CAPTURED * WIDTH)
    return runner


def make(drafter: str) -> verify_graphs.VerifyGraphRunner:
    torch.cpu.is_current_stream_capturing = lambda: False
    PluginConfig(drafter=drafter).to_env()
    verify_graphs.buckets_of = lambda runner, width: BUCKETS
    sglang_runner.get_batch_sizes_to_capture = lambda *_, **__: ([1, 2, CAPTURED], [])
    sglang_runner.resolve_decode_backend = lambda _: Graphs()
    sglang_runner.DecodeCudaGraphRunner.capture = lambda self: self._capture_one_stream()
    return verify_graphs.VerifyGraphRunner(model_runner())


def prefixes(runner: verify_graphs.VerifyGraphRunner, lengths: list[int]) -> torch.Tensor:
    attention, table = runner.attn_backend, runner.attn_backend.page_table
    rows = 1 + torch.randperm(REQUESTS)[: len(lengths)]
    attention.cache[1:] = NOBODYS
    for row, length in zip(rows.tolist(), lengths, strict=True):
        attention.cache[table[row, :length].long()] = torch.randn(length, 1, SIZE)
    return rows


def verification(
    runner: verify_graphs.VerifyGraphRunner,
    lengths: list[int],
    verify_lens: torch.Tensor,
    rows: torch.Tensor,
    bucket: int,
) -> ForwardBatch:
    """Verification of R requests in a step of `bucket` tokens, as in the server."""
    count, seq_lens = len(lengths), torch.tensor(lengths)
    anchors, drafts = torch.randint(VOCAB, (count,)), torch.randint(VOCAB, (count, WIDTH - 1))
    flat = flatten(anchors, drafts, verify_lens, seq_lens, runner.attn_backend.page_table, rows, bucket)
    layout = ragged_layout(flat.qo_indptr, len(flat.request))
    shown = verify_graphs.shows_hidden_states()
    spec = verify_input(flat.positions, layout, WIDTH, shown)
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=count, input_ids=flat.input_ids, req_pool_indices=rows,
        seq_lens=seq_lens, out_cache_loc=flat.slots, seq_lens_sum=None, seq_lens_cpu=None, positions=flat.positions,
        spec_info=spec, capture_hidden_mode=spec.capture_hidden_mode, orig_seq_lens=seq_lens,
    )  # fmt: skip
    batch.flat, batch.drafts = flat, drafts
    return batch


def alone(runner: verify_graphs.VerifyGraphRunner, batch: ForwardBatch, verify_lens: torch.Tensor) -> torch.Tensor:
    """Logits of the batch's tokens, one request at a time, without SGLang."""
    attention, flat, logits = runner.attn_backend, batch.flat, []
    for index, length in enumerate(batch.seq_lens.tolist()):
        begin, end = flat.qo_indptr[index : index + 2].tolist()
        x = runner.model_runner.model.embedding[flat.input_ids[begin:end]]
        x = x + runner.model_runner.model.places[flat.positions[begin:end]]
        row = attention.page_table[batch.req_pool_indices[index]]
        known = torch.cat([attention.cache[row[:length].long(), 0], x])
        scores = x @ known.T * 0.3
        seen = torch.arange(end - begin + length) <= length + torch.arange(end - begin)[:, None]
        hidden = torch.softmax(scores.masked_fill(~seen, float("-inf")), 1) @ known
        logits.append(hidden @ runner.model_runner.model.embedding.T)
    return torch.cat(logits)


def sampling_of(count: int, kind: int) -> Sampling:
    """Greedy requests; sampled ones by temperature, by all rules; and seeded ones mixed with all kinds."""
    draw = torch.rand(count)
    greedy = draw < (1.0, 0.0, 0.0, 0.3)[kind]
    seeded = ~greedy & (draw < (0.0, 0.0, 0.0, 0.6)[kind])
    rules = Rules(torch.where(greedy, 0.0, 0.5 + torch.rand(count)))
    if kind > 1:
        rules = Rules(rules[0], torch.randint(2, 30, (count,)), 0.5 + torch.rand(count) / 2, torch.rand(count) / 9)
    decided = greedy | seeded
    said = bool(greedy.all()), bool(seeded.any()), bool(decided.all())
    return Sampling(rules, torch.randint(1 << 40, (count,)), seeded, decided, *said)


def draft_of(runner: Any, batch: ForwardBatch) -> Draft:
    """Lookups, with a point mass as q, and where q fits, drafts drawn from it."""
    drafts, count = batch.drafts, len(batch.drafts)
    lens, sure, probs, points = torch.zeros(count), torch.zeros(drafts.shape), None, None
    if runner.room is not None and torch.rand(()) < 0.8:
        probs = runner.room[0]
        probs[:count] = (3 * torch.randn(count, WIDTH - 1, VOCAB)).softmax(-1)
        points = torch.rand(count) < 0.3
        probs[:count][points] = torch.nan
    return Draft(drafts, lens.long(), sure, probs, points=points)


def accepted_by_worker(sampling: Sampling, draft: Draft, verify_lens: torch.Tensor, flat: Any, logits: Any) -> Any:
    """Outcomes by the code for steps without graphs."""
    if draft.points is not None:
        batch = Verification(draft.tokens, verify_lens, flat.qo_indptr, draft_probs=draft.probs, points=draft.points)
        draft = replace(draft, probs=with_point_masses(batch, VOCAB).draft_probs, points=None)
    return sampling.accept(logits, draft, verify_lens, flat)


def check_tail(runner: Any, batch: ForwardBatch, verify_lens: torch.Tensor, out: LogitsProcessorOutput) -> int:
    """Check that the tail has accepted and committed as the worker would."""
    flat = batch.flat
    total = int(flat.qo_indptr[-1])
    cut = flat._replace(request=flat.request[:total], positions=flat.positions[:total])
    how = batch.sampling, batch.draft, verify_lens, cut, out.next_token_logits[:total]
    accept_lens, tokens = accepted_by_worker(*how)
    made = runner.tail.results(len(verify_lens), len(flat.request))
    new_seq_lens, bonus, slots = commit(accept_lens, tokens, batch.seq_lens, flat.request, flat.step, flat.slots)
    for part, expected in zip(made, (accept_lens, tokens, new_seq_lens, bonus), strict=True):
        assert torch.equal(part, expected)
    expected = torch.full_like(runner.kept, -1)
    expected[slots] = flat.input_ids
    assert torch.equal(runner.kept[1:], expected[1:])
    return int(accept_lens.sum())


def replay_anchors_alone(runner: verify_graphs.VerifyGraphRunner, requests: int, bucket: int) -> None:
    """Steps of the same requests without drafts, of which the first alone is laid out for the tail."""
    tail, sampling, verify_lens = runner.model_runner.tail, sampling_of(requests, 3), torch.zeros(requests).long()
    for _ in range(3 * BUCKETS.has_graph(requests, bucket)):
        lengths = torch.randint(1, CONTEXT - WIDTH, (requests,)).tolist()
        batch = verification(runner, lengths, verify_lens, prefixes(runner, lengths), bucket)
        batch.sampling, batch.draft = sampling, Draft.nothing(requests, WIDTH - 1, "cpu")
        tail.open(batch.draft, sampling, verify_lens, batch.flat, alone=True)
        runner.model_runner.kept.fill_(-1)
        check_tail(runner.model_runner, batch, verify_lens, runner.execute(batch))


def replay_all(runner: verify_graphs.VerifyGraphRunner) -> dict[str, int]:
    """Steps of all sizes and several lengths. Raises if a replay differs from each request alone."""
    torch.manual_seed(2)
    replayed = eager = full = committed = 0
    for bucket in reversed(BUCKETS.sizes):  # leftovers of a larger one must not matter
        for requests in range(1, min(REQUESTS, bucket) + 1):
            if bucket > BUCKETS.round_up(min(requests * WIDTH, BUCKETS.sizes[-1])):
                continue
            for _ in range(3):
                lengths = torch.randint(1, CONTEXT - WIDTH, (requests,)).tolist()
                verify_lens = torch.randint(WIDTH, (requests,))
                while requests + int(verify_lens.sum()) > bucket:
                    verify_lens[verify_lens.argmax()] -= 1
                rows = prefixes(runner, lengths)
                batch = verification(runner, lengths, verify_lens, rows, bucket)
                runs = runner.can_run_graph(batch)
                assert runs == BUCKETS.has_graph(requests, bucket), (requests, bucket)
                if not runs:
                    eager += 1
                    continue
                wanted, verified = alone(runner, batch, verify_lens), requests + int(verify_lens.sum())
                tail = runner.model_runner.tail
                batch.sampling, batch.draft = sampling_of(requests, replayed % 4), draft_of(runner.model_runner, batch)
                (tail.open(batch.draft, batch.sampling, verify_lens, batch.flat) if replayed % 3 else tail.close())
                runner.model_runner.kept.fill_(-1)
                out = runner.execute(batch)
                committed += check_tail(runner.model_runner, batch, verify_lens, out) if replayed % 3 else 0
                if replayed % 3 == 0:
                    assert bool((runner.model_runner.kept[1:] == -1).all())
                assert len(out.next_token_logits) == bucket
                torch.testing.assert_close(out.next_token_logits[:verified], wanted)
                if verify_graphs.shows_hidden_states():
                    assert out.hidden_states.shape == (bucket, SIZE)
                replayed, full = replayed + 1, full + (requests == bucket)
            replay_anchors_alone(runner, requests, bucket)
    return {"replayed": replayed, "eager": eager, "full": full, "committed": committed}


def foreign_reads() -> int:
    """Full batches in which the last request takes the padding: how many read unused slots."""
    runner, count = make("dspark"), 0
    runner.buckets = SimpleNamespace(
        slots=lambda tokens: CAPTURED, has_graph=lambda *_: True, graphs=(BUCKETS.graphs[-1],), width=WIDTH
    )
    runner.backend = Graphs()
    runner._capture_one_stream()
    for _ in range(8):
        lengths, verify_lens = [5] * CAPTURED, torch.tensor([WIDTH - 1] * (CAPTURED - 1) + [0])
        rows = prefixes(runner, lengths)
        batch = verification(runner, lengths, verify_lens, rows, BUCKETS.graphs[-1])
        runner.execute(batch)
        kv_lens = runner.attn_backend.kv_lens[:CAPTURED]
        count += bool((kv_lens > batch.seq_lens + verify_lens + 1).any())
    return count


def faults() -> dict[str, bool]:
    """Wrong buffers of the tail: whether replays detect it."""
    seen, runner = {}, make("dspark")
    tail, taken = runner.model_runner.tail, VerifyTail.open
    rules = tail._rules._buffers
    changes = {
        "seeds": lambda: rules["seeds"].add_(1),
        "decided": lambda: rules["decided"].logical_not_(),
        "lookups": lambda: tail._points.logical_not_(),
        "temperatures": lambda: rules["temperatures"].mul_(1.5),
        "top-k": lambda: rules["top_ks"].fill_(1),
        "top-p": lambda: rules["top_ps"].fill_(0.1),
    }
    for name, change in changes.items():

        def opened(tail: VerifyTail, *arguments: Any, change: Any = change) -> None:
            tail._rules._taken = ()
            taken(tail, *arguments)
            change()

        with mock.patch.object(VerifyTail, "open", opened):
            try:
                replay_all(runner)
                seen[name] = False
            except AssertionError:
                seen[name] = True
    return seen


def main() -> None:
    publish(ARGUMENTS, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    with get_parallel().override(tp_group=SimpleNamespace(world_size=1)):
        print(json.dumps(replay_both()))


def replay_both() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for drafter in ("dspark", "ngram"):
        runner = make(drafter)
        replays = replay_all(runner)
        traces = runner.backend.traces
        results[drafter] = {
            "captured": sorted(key.size for key in traces),
            "buckets": BUCKETS.graphs,
            "sizes": BUCKETS.sizes,
            "logits": runner.buffers.next_token_logits_buffer.nbytes,
            "hidden": runner.capture_hidden_mode.name,
            "buffers": runner.attn_backend.most,
            "same operations": all(trace == made[0] for made in traces.values() for trace in made),
            **replays,
        }
    results["dspark"]["without a slot more"] = foreign_reads()
    results["dspark"]["faults"] = faults()
    return results


if __name__ == "__main__":
    main()
