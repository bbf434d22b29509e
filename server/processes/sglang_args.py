"""Translate our settings to SGLang's ServerArgs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..machine import hardware
from ..model import bundled_model, families
from ..model.target import Model
from ..plugin.buckets import FIRST_TOKEN_SECONDS, REQUEST_SECONDS, TOKEN_SECONDS
from ..settings import gpu_attention, traces
from ..settings.memory import REQUESTS, MemoryPlan
from ..settings.parallel import SGLangParser
from ..settings.setting import declared, name_of
from ..settings.settings import Settings
from . import data_parallel, logs

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ALGORITHM = "OUTRIDER"
SET_BY_OUTRIDER = {each.name: name_of(each.name) for each, _ in declared(Settings) if each.name != "quantization"} | {
    "model_path": "--model",
    "admin_api_key": "--api-keys",
    "enable_trace": "--otlp-endpoint",
    "otlp_traces_endpoint": "--otlp-endpoint",
    "dp_size": "--engines",
    "load_balance_method": "--engines",
    "speculative_algorithm": "--drafter",
    "speculative_num_draft_tokens": "--gamma",
    "dllm_algorithm": "--unmasking",
    "dllm_algorithm_config": "--unmasking",
}
"""Our flag for each of SGLang's fields that our settings set."""
NAMED_ALIKE = (
    *("host", "port", "disable_radix_cache", "sampling_defaults", "max_running_requests", "chunked_prefill_size"),
    *("tool_call_parser", "reasoning_parser", "chat_template"),
)
"""Settings with the same name in SGLang, which chooses a value if ours is None."""
FURTHER_CACHES = (
    *("enable_hierarchical_cache", "hicache_storage_backend", "enable_lmcache", "lmcache_config_file"),
    *("enable_flexkv", "flexkv_config_file", "enable_unified_cache_external_linker", "radix_cache_backend"),
    "enable_hisparse",
)
# Flags of SGLang for its own HTTP server, which does not run here, or in conflict with ours.
UNAVAILABLE = {
    "tokenizer_worker_num": "one tokenizer process",
    "enable_dp_attention": "all ranks verify the same drafts, with lengths from the first rank; "
    "--engines N gives separate engines",
    "pp_size": "a step is planned as one forward of all layers; --tp-size spreads every layer instead",
    **dict.fromkeys(("grpc_port", "grpc_mode", "smg_grpc_mode"), "HTTP only"),
    "enable_http2": "HTTP/1.1 only",
    "is_embedding": "text generation only",
    "skip_tokenizer_init": "requests in text",
    "max_loaded_loras": "adapters stay loaded until an administrator unloads them",
    "lora_backend": "our own products on a CPU, SGLang's `triton` on a GPU",
    "enable_pd_role_switch": "a server keeps its part",
    "trust_remote_code": "no code from models",
    "ssl_keyfile_password": "OUTRIDER_SSL_KEYFILE_PASSWORD, which no process list shows",
    "enable_ssl_refresh": "renewed certificates are taken up anyway",
    "enable_custom_logit_processor": "no code from requests",
    "config": "flags on the command line",
    "incremental_streaming_output": "an answer's text is read whole, so that it can be cut where its tokens end",
    "dllm_fdfo": "every round takes all requests",
    **dict.fromkeys(FURTHER_CACHES, "it brings back keys and values alone, without their tokens and drafter states"),
}

GRAMMAR_BACKENDS = ("xgrammar", "none")
"""SGLang's other backends bound neither time nor memory of a grammar: one request could stop all."""

JSON_WHITESPACE = 8
"""Most white space between two tokens of JSON. Without a bound a model may write it for ever."""


def build(settings: Settings, model: Model, memory: MemoryPlan, engines: int) -> ServerArgs:
    """Make SGLang's arguments. Load plugins first: they add choices to SGLang's flags."""
    from sglang.srt.server_args import ServerArgs

    given, context = parse_flags(settings.sglang_flags), settings.context_length
    if memory.max_total_tokens is not None:
        # A request that does not fit the cache is then refused like any that is beyond the context.
        context = min(context or model.context_length, memory.max_total_tokens)
    arguments: dict[str, Any] = {
        "model_path": model.path,
        "served_model_name": settings.served_model_name or model.name,
        "dtype": settings.resolved_dtype,
        "device": settings.resolved_device,
        "context_length": context,
        "max_total_tokens": memory.max_total_tokens,
        "max_mamba_cache_size": memory.states,
        "log_level": logs.sglang_level(settings),
        "dp_size": engines,
        "load_balance_method": data_parallel.BALANCE,
        "enable_metrics": True,
        "bucket_time_to_first_token": list(FIRST_TOKEN_SECONDS),
        "bucket_inter_token_latency": list(TOKEN_SECONDS),
        "bucket_e2e_request_latency": list(REQUEST_SECONDS),
        "enable_cache_report": True,
        "constrained_json_max_whitespace_cnt": JSON_WHITESPACE,
    }
    if settings.otlp_endpoint is not None:
        arguments |= traces.arguments(settings.otlp_endpoint)
    if settings.has_adapters:
        arguments |= {"enable_lora": True, "lora_paths": list(settings.lora_paths) or None, "lora_backend": "triton"}
        if settings.resolved_device == "cpu":  # SGLang asks for slots' sizes; ours have none
            arguments |= {"max_lora_rank": 1, "lora_target_modules": ["all"]}
    arguments |= {name: value for name in NAMED_ALIKE if (value := getattr(settings, name)) is not None}
    if model.name != bundled_model.NAME:
        arguments.setdefault("tool_call_parser", "auto")  # by the chat template; the embedded model's has no tools
    if settings.resolved_device == "cpu":
        arguments |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "page_size": 1,
            "disable_overlap_schedule": True,
            "disable_hybrid_swa_memory": True,  # our attention has one KV slot a token for all layers
            "model_impl": "transformers" if families.on_a_cpu(model) == families.TRANSFORMERS else "auto",
            "sleep_on_idle": True,  # its busy polling would take half the machine from the other processes
        }
        if settings.parallel.role == "decode":
            arguments["disaggregation_decode_retraction_backup"] = "cpu_tensor"  # SGLang's other pool is a GPU's
    else:
        arguments |= gpu_attention.choose(hardware.compute_capability(), model, given, settings.resolved_dtype)
        arguments |= gpu_attention.graphs(
            None if settings.diffusion else given.get("attention_backend") or arguments["attention_backend"],
            given,
            ranks=settings.parallel.tp_size,
            adapters=settings.has_adapters,
        )
    arguments |= _decoding(settings, context or model.context_length, memory.max_total_tokens)
    if settings.reads_in_chunks and not settings.disable_radix_cache and not given.get("enable_priority_scheduling"):
        arguments["schedule_policy"] = "shortest-prefill-first"
    try:
        return ServerArgs(**(arguments | given))
    except (TypeError, ValueError) as error:
        raise UserError(f"SGLang refuses these settings: {first_line(error)}") from None


def _decoding(settings: Settings, context: int, cache: int | None) -> dict[str, Any]:
    """Return the arguments that select our worker, or block diffusion.

    context: tokens of prompt and answer together. cache: tokens of the KV cache; None: unknown.
    """
    if settings.diffusion is None:
        # Our worker also runs without a drafter (every step then verifies the anchor alone), so that sampling, seeds
        # and penalties are the same code with speculation on and off.
        return {
            "speculative_algorithm": ALGORITHM,
            "speculative_num_draft_tokens": (settings.plugin_config.longest if settings.drafter != "off" else 0) + 1,
        }
    block = settings.diffusion.block_size
    return {
        "dllm_algorithm": ALGORITHM,
        "dllm_fdfo": True,
        "page_size": block,  # a page is a block, so that shared prefixes end where a block does
        "max_running_requests": settings.max_running_requests or REQUESTS,
        # The open block ends within the context, and SGLang holds a page back from the longest request.
        "context_length": min(context, (cache or context + block) - block) // block * block,
    }


def parse_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Return the values of the flags given after `--`, by the name of their field."""
    if not flags:
        return {}
    from sglang.srt.server_args import ServerArgs

    parser = SGLangParser()
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        action.required = False
    given = vars(parser.parse_args(list(flags)))
    for name in given:
        if name in SET_BY_OUTRIDER:
            raise UserError(
                f"say {SET_BY_OUTRIDER[name]} before the --, instead of SGLang's --{name.replace('_', '-')} after it"
            )
        if name in UNAVAILABLE:
            raise UserError(f"SGLang's --{name.replace('_', '-')} is not available here: {UNAVAILABLE[name]}")
    if (backend := given.get("grammar_backend", "xgrammar")) not in GRAMMAR_BACKENDS:
        raise UserError(
            f"SGLang's --grammar-backend {backend} is not available here: only xgrammar's grammars are limited in time "
            "and memory, and one request's could stop all others; leave the flag out, or say none"
        )
    return given


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
