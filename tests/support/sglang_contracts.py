"""Fingerprints of SGLang's code that Outrider replaces, overrides or relies on: `sglang_contracts.json`.

`python tests/support/sglang_contracts.py` prints the differences to the installed SGLang, with the places of our code,
and the architectures that the family table lacks. `--write` writes the fingerprints anew, with our file for each. Do so
after reading every change and adapting our code.
"""

import ast
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from outrider.server.model import families

FILE = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).resolve().parents[2]

RELIED_ON = """
sglang.kernels.fused_op.BaseFusedOp.register_oot_forward
sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend
sglang.srt.constrained.xgrammar_backend.XGrammarGrammar
sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.dispatch_structural_tag
sglang.srt.disaggregation.common.conn.CommonKVManager.get_mha_kv_ptrs_with_pp
sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager
sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.get_next_disagg_decode_batch_to_run
sglang.srt.disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt
sglang.srt.disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin.process_prebuilt
sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager
sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin._send_kv_chunk
sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.process_batch_result_disagg_prefill
sglang.srt.dllm.mixin.req.ReqDllmMixin.init_diffusion_llm
sglang.srt.dllm.mixin.scheduler.SchedulerDllmMixin.get_new_batch_dllm
sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._resolve_lora_path
sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request
sglang.srt.function_call.utils.get_json_schema_constraint
sglang.srt.layers.activation.GeluAndMul.forward_native
sglang.srt.layers.activation.SiluAndMul.forward_native
sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.forward_extend
sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.init_forward_metadata
sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend._full_cg_prefill_workspace_bytes
sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend.forward_extend
sglang.srt.layers.attention.flashinfer_backend.fast_prefill_plan
sglang.srt.layers.attention.graph_utils.padded_extend_real_tokens
sglang.srt.layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend.forward_extend
sglang.srt.layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend.init_forward_metadata
sglang.srt.layers.attention.vision.VisionSdpaAttention.forward
sglang.srt.layers.layer_boundary.residual.access.final_norm_pair
sglang.srt.layers.layer_boundary.residual.batch.final_norm
sglang.srt.layers.layernorm.Gemma3RMSNorm.forward_cpu
sglang.srt.layers.layernorm.Gemma3RMSNorm.forward_native
sglang.srt.layers.layernorm.RMSNorm.forward_native
sglang.srt.layers.linear.ColumnParallelLinear.forward
sglang.srt.layers.linear.RowParallelLinear.forward
sglang.srt.layers.logits_processor.LogitsProcessor._copy_logits_to_buffer
sglang.srt.layers.logits_processor.LogitsProcessor._get_logits
sglang.srt.layers.logits_processor.LogitsProcessor.forward
sglang.srt.layers.moe.fused_moe_native.moe_forward_native
sglang.srt.layers.radix_attention.RadixAttention.forward
sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native
sglang.srt.layers.rotary_embedding.factory.get_rope
sglang.srt.layers.rotary_embedding.rope_variant.Phi3LongRoPEScaledRotaryEmbedding
sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding.forward
sglang.srt.lora.lora_registry.LoRARegistry
sglang.srt.managers.io_struct.GenerateReqInput._normalize_image_data
sglang.srt.managers.load_snapshot.ShmLoadSnapshotReader
sglang.srt.managers.load_snapshot.ShmLoadSnapshotWriter
sglang.srt.managers.mm_utils.embed_mm_inputs
sglang.srt.managers.mm_utils.pad_mm_tokens
sglang.srt.managers.mm_utils.prepare_mm_inputs
sglang.srt.managers.overlap_utils.FutureMap
sglang.srt.managers.schedule_batch.MultimodalDataItem
sglang.srt.managers.schedule_batch.MultimodalProcessorOutput
sglang.srt.managers.schedule_batch.Req.__init__
sglang.srt.managers.schedule_batch.Req.init_next_round_input
sglang.srt.managers.schedule_batch.Req.owned_kv_len
sglang.srt.managers.schedule_batch.Req.refresh_fill_ids
sglang.srt.managers.schedule_batch.Req.reset_for_retract
sglang.srt.managers.schedule_batch.Req.tail_str
sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch
sglang.srt.managers.schedule_batch.ScheduleBatch.merge_batch
sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode
sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend
sglang.srt.managers.schedule_policy.PrefillAdder._account_prefill_cache_admission
sglang.srt.managers.schedule_policy.PrefillAdder._commit_prefill_admission
sglang.srt.managers.schedule_policy.PrefillAdder._select_prefill_admission
sglang.srt.managers.schedule_policy.PrefillAdder._get_running_request_total_token_offset
sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req
sglang.srt.managers.scheduler.Scheduler._add_request_to_queue
sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run
sglang.srt.managers.scheduler.Scheduler._release_aborted_request
sglang.srt.managers.scheduler.Scheduler._try_apply_padded_mm_input_ids
sglang.srt.managers.scheduler.Scheduler.can_schedule_lora_req
sglang.srt.managers.scheduler.Scheduler.process_batch_result
sglang.srt.managers.scheduler.Scheduler.run_batch
sglang.srt.managers.scheduler.Scheduler.send_abort_output
sglang.srt.managers.scheduler.Scheduler.stash_chunked_request
sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._maybe_update_reasoning_tokens
sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_decode
sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prefill
sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin._unload_lora_adapter_locked
sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.load_lora_adapter
sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason
sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req
sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_request
sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state
sglang.srt.managers.tokenizer_manager.TokenizerManager._release_lora_once
sglang.srt.managers.tokenizer_manager.TokenizerManager._release_req_states_on_failure
sglang.srt.managers.tokenizer_manager.TokenizerManager._resolve_lora_path
sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request
sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request
sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request
sglang.srt.managers.tokenizer_manager.TokenizerManager.init_tokenizer_and_processor
sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation
sglang.srt.managers.utils.GenerationBatchResult
sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator
sglang.srt.mem_cache.common.checkpoint_kv_cache
sglang.srt.mem_cache.common.match_kv_cache
sglang.srt.mem_cache.common.release_kv_cache
sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal
sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup
sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._kv_buffer_shapes
sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._store_kv_layer
sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer
sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new
sglang.srt.model_executor.model_runner.ModelRunner._forward_raw
sglang.srt.model_executor.model_runner.ModelRunner.forward
sglang.srt.model_executor.runner.base_runner.BaseRunner._dummy_run
sglang.srt.models.gemma3_causal.Gemma3Attention.forward
sglang.srt.models.gemma3_causal.Gemma3Attention.forward_cpu
sglang.srt.models.gemma3_causal.Gemma3DecoderLayer.forward
sglang.srt.models.gemma3_causal.Gemma3TextModel.forward
sglang.srt.models.llama.LlamaAttention.forward
sglang.srt.models.llama.LlamaDecoderLayer.forward
sglang.srt.models.llama.LlamaForCausalLM.forward
sglang.srt.models.llama.LlamaForCausalLM.set_dflash_layers_to_capture
sglang.srt.models.llama.LlamaMLP.forward
sglang.srt.models.llama4.Llama4Attention.forward
sglang.srt.models.llama4.Llama4MoE
sglang.srt.models.olmo2.Olmo2Attention.forward
sglang.srt.models.olmo2.Olmo2DecoderLayer.forward
sglang.srt.models.qwen2.Qwen2Attention.forward
sglang.srt.models.qwen2.Qwen2DecoderLayer.forward
sglang.srt.models.qwen2.Qwen2ForCausalLM.forward
sglang.srt.models.qwen2.Qwen2MLP.forward
sglang.srt.models.qwen2_5_vl.Qwen2_5_VisionTransformer
sglang.srt.models.qwen2_vl.Qwen2VisionTransformer
sglang.srt.models.qwen3.Qwen3Attention.forward
sglang.srt.models.qwen3.Qwen3Attention.forward_prepare_native
sglang.srt.models.qwen3.Qwen3DecoderLayer.forward
sglang.srt.models.qwen3.Qwen3ForCausalLM.forward
sglang.srt.models.qwen3_vl.Qwen3LLMModel
sglang.srt.models.qwen3_vl.Qwen3VLMoeVisionModel
sglang.srt.models.utils.apply_qk_norm
sglang.srt.plugins.hook_registry._propagate_patch
sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo
sglang.srt.speculative.base_spec_worker.BaseSpecWorker
sglang.srt.speculative.ragged_verify.RaggedVerifyLayout
sglang.srt.speculative.ragged_verify.build_capture_verify_lens
sglang.srt.speculative.ragged_verify.resolve_ragged_verify_layout
sglang.srt.speculative.spec_info.SpecInput
sglang.srt.speculative.spec_info.SpeculativeAlgorithm
sglang.srt.speculative.spec_info.create_dummy_verify_input
sglang.srt.speculative.spec_registry.CustomSpecAlgo
""".split()  # noqa: SIM905
"""Code that ours relies on, in addition to the results of `TOUCHED`."""

TOUCHED = """
import importlib, itertools, json, os, pkgutil, sys
os.environ["OUTRIDER_PROMPT_LOGITS"] = "/dev/null"
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from outrider.server.plugin import must_take
places = {}
def noting(change):
    def noted(target, *others, **named):
        caller, before = sys._getframe(1), len(must_take.replaced)
        change(target, *others, **named)
        for name in [target] if isinstance(target, str) else must_take.replaced[before:]:
            places.setdefault(name, f"{caller.f_code.co_filename}:{caller.f_lineno}")
    return noted
HookRegistry.register, must_take.replace = noting(HookRegistry.register), noting(must_take.replace)
load_plugins()
from outrider.server import http, plugin, processes
from outrider.server.plugin.diffusion import models
from outrider.server.plugin.diffusion.target import DiffusionTarget
from outrider.server.plugin.cuda import prefill_graphs, tuning
from outrider.server.plugin.hooks import disaggregation, draft_memory, register
from outrider.server.plugin.loading import more_models
disaggregation.register_hooks()
draft_memory.register()
prefill_graphs.register()
tuning.register()
more_models.register()
register._capture_verification()
models.register(DiffusionTarget(block_size=4, mask_token_id=0))
walks = [pkgutil.walk_packages(folder.__path__, folder.__name__ + ".") for folder in (plugin, http, processes)]
for found in itertools.chain(*walks):
    module = importlib.import_module(found.name)
    for cls in [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]:
        for name in vars(cls):
            base = next((base for base in cls.__mro__[1:] if name in vars(base)), object)
            raw, full = vars(base).get(name), f"{base.__qualname__}.{name}"
            code = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
            if base.__module__.startswith("sglang.") and getattr(code, "__qualname__", "") == full:
                places.setdefault(f"{base.__module__}.{full}", f"{module.__file__}:{cls.__qualname__}")
print("\\n" + json.dumps(places))
"""
"""Prints the names that we hook, replace or override, on CPUs and GPUs, and where."""


@cache
def touched() -> dict[str, str]:
    """Names that we change, each with our file and line or class. Raises RuntimeError if the installed SGLang does not
    fit."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", TOUCHED], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip())
    places = {name: place.rsplit(":", 1) for name, place in json.loads(ran.stdout.splitlines()[-1]).items()}
    return {name: f"{os.path.relpath(Path(path).resolve(), ROOT)}:{part}" for name, (path, part) in places.items()}


def fingerprints(names: list[str]) -> dict[str, str]:
    """16 hex digits of each name's code without comments and docstrings. Raises LookupError for missing names."""
    digests = {}
    for name in names:
        code = ast.dump(_without_docstrings(_definition(name)), include_attributes=False)
        digests[name] = hashlib.sha256(code.encode()).hexdigest()[:16]
    return digests


def _definition(name: str) -> ast.AST:
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (path := _path(".".join(parts[:end]))) is not None:
            return _within(path, parts[:end], parts[end:], name)
    raise LookupError(name)


def _path(module: str) -> Path | None:
    base = Path(str(distribution("sglang").locate_file("/".join(module.split(".")))))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _within(path: Path, module: list[str], parts: list[str], name: str) -> ast.AST:
    first, *inner = parts
    node = next((child for child in ast.walk(_tree(path)) if _defines(child, first)), None)
    if node is None:
        return _imported(path, module, parts, name)
    for part in inner:
        node = next((child for child in node.body if _defines(child, part)), None)  # type: ignore[attr-defined]
        if node is None:
            raise LookupError(name)
    return node


def _defines(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name


def _imported(path: Path, module: list[str], parts: list[str], name: str) -> ast.AST:
    package = module if path.name == "__init__.py" else module[:-1]
    for child in ast.walk(_tree(path)):
        if not isinstance(child, ast.ImportFrom):
            continue
        above = package[: len(package) - child.level + 1] if child.level else []
        for alias in child.names:
            if alias.name == "*" or (alias.asname or alias.name) == parts[0]:
                original = parts[0] if alias.name == "*" else alias.name
                try:
                    return _definition(".".join([*above, *filter(None, [child.module]), original, *parts[1:]]))
                except LookupError:
                    continue
    raise LookupError(name)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _without_docstrings(node: ast.AST) -> ast.AST:
    for inner in ast.walk(node):
        body = getattr(inner, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            inner.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return node


def read() -> dict[str, Any]:
    """SGLang's version, fingerprints and our files as of the last review."""
    return dict(json.loads(FILE.read_text()))


def files(places: dict[str, str]) -> dict[str, str]:
    """Our file for each name in the result of `touched`."""
    return {name: place.rpartition(":")[0] for name, place in sorted(places.items())}


def differences(places: dict[str, str]) -> list[str]:
    """A line for each fingerprint that has changed, is missing, or is of code that we no longer touch.

    places: our code for each name.
    """
    known, names = read()["fingerprints"], sorted({*RELIED_ON, *places})
    lines = [f"{name} is no longer touched" for name in known if name not in names]
    for name in names:
        place = places.get(name, "relied on")
        try:
            (found,) = fingerprints([name]).values()
        except LookupError:
            lines.append(f"{name} is not there ({place})")
            continue
        if name not in known:
            lines.append(f"{name} has not been read ({place})")
        elif found != known[name]:
            lines.append(f"{name} has changed ({place})")
    return lines


def architectures() -> set[str]:
    """Names in SGLang's registry of models, including modules that import only on a GPU."""
    names = set()
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    for path in (Path(spec.origin).parent / "srt" / "models").glob("*.py"):
        _, name, rest = path.read_text().partition("\nEntryClass")
        for statement in ast.parse(name.strip() + rest).body if name else []:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "EntryClass":
                value = statement.value
                names |= {ast.unparse(each) for each in (value.elts if isinstance(value, ast.List) else [value])}
    return names


def report() -> list[str]:
    """A line for each change to read before Outrider moves to the installed SGLang."""
    lines = []
    try:
        places = touched()
    except RuntimeError as error:
        lines.append(f"Outrider does not fit it: {str(error).splitlines()[-1]}")
        places = read()["files"]
    listed = families.SERVED.union(*(each.names.split() for each in families.REFUSED))
    new = [f"{name} is not in server/model/families.toml" for name in sorted(architectures() - listed)]
    return [*lines, *differences(places), *new]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        now = fingerprints(sorted({*RELIED_ON, *touched()}))
        contract = {"sglang": version("sglang"), "fingerprints": now, "files": files(touched())}
        FILE.write_text(json.dumps(contract, indent=1) + "\n")
    else:
        lines = report()
        print(f"SGLang {version('sglang')}, read was {read()['sglang']}:", *lines or ["nothing to read"], sep="\n")
        sys.exit(bool(lines))
