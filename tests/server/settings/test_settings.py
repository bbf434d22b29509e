"""Settings, their translation to SGLang's, and the memory plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refuses
from tiny_drafters import DFLASH, DFLASH2

from outrider.server.bench import simulate
from outrider.server.bench.load import cli as load
from outrider.server.cli import serve
from outrider.server.cli.main import main
from outrider.server.errors import UserError
from outrider.server.machine import hardware
from outrider.server.model import target
from outrider.server.model.target import Model
from outrider.server.plugin.config import PluginConfig
from outrider.server.settings import learning, memory
from outrider.server.settings.settings import Settings
from outrider.server.tune import cli as tune

CPU = {"device": "cpu", "dtype": "bfloat16"}
COMMANDS = {"serve": serve, "tune": tune, "bench load": load, "simulate --steps 9": simulate}
FORMER = [(command, *moved) for command, module in COMMANDS.items() for moved in module.MOVED.items()]


@pytest.fixture(scope="module")
def smollm2() -> Model:
    return target.find(None)


def test_a_drafter_for_each_key_needs_keys_and_a_cpu(monkeypatch: pytest.MonkeyPatch, smollm2: Model) -> None:
    refuses("goes with --learn", Settings, learn_per="key")
    refuses("goes with --api-keys", learning.with_start, Settings(**CPU, learn=True, learn_per="key"), smollm2)
    given = Settings(**CPU, learn=True, learn_per="key", learn_keys=3, api_keys=Path("keys.toml"))
    started = learning.with_start(given, smollm2)
    assert (started.plugin_config.learn_keys, started.learned) == (3, "")
    assert replace(started, learn_per="server").plugin_config.learn_keys == 0
    with pytest.raises(UserError, match="--learn-per key goes with --drafter dspark or dflash, not deer"):
        learning.with_start(replace(given, drafter="deer"), smollm2)
    monkeypatch.setattr(hardware, "has_gpu", lambda: True)
    refuses("on a CPU so far", learning.with_start, replace(given, device="cuda"), smollm2)


def test_a_drafter_for_each_adapter_needs_adapters(smollm2: Model) -> None:
    refuses("--learn-per adapter goes with --learn", Settings, learn_per="adapter", enable_lora=True)
    given = Settings(**CPU, learn=True, learn_per="adapter", learn_keys=3)
    refuses("goes with --lora-paths or --enable-lora", learning.with_start, given, smollm2)
    started = learning.with_start(replace(given, enable_lora=True), smollm2)
    assert (started.plugin_config.learn_keys, started.learned) == (3, "")


@pytest.mark.slow
def test_every_drafter_with_weights_learns(smollm2: Model, tmp_path: Path) -> None:
    """A drafter that does not come with the model starts from its layers."""
    for drafter in ("dspark", "dflash", "dflash2", "eagle3", "deer", "specdiff"):
        given = Settings(**CPU, learn=True, drafter=drafter)
        started = learning.with_start(replace(given, learn_folder=tmp_path / drafter), smollm2)
        assert (started.drafter, bool(started.drafter_path)) == (drafter, drafter in ("dflash2", "eagle3"))
    head = str(tmp_path / "eagle3" / learning.START)
    started = learning.with_start(Settings(**CPU, learn=True, drafter_path=head), smollm2)
    assert "eagle3" in started.learn_folder.name
    for drafter in ("ngram", "mtp"):
        asked = Settings(**CPU, learn=True, drafter=drafter)
        refuses(f"goes with --drafter dspark or .* or specdiff, not {drafter}", learning.with_start, asked, smollm2)
    asked, windows = Settings(**CPU, learn=True, drafter_path=str(tmp_path)), replace(DFLASH, windows=(4, -1))
    cases = {"layers with sliding windows": windows, "scaled or capped logits": replace(DFLASH2, logit_cap=5.0)}
    for what, config in cases.items():
        (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
        refuses(f"--learn does not train .*: it has {what}", learning.with_start, asked, smollm2)


def test_plugin_config_survives_the_environment() -> None:
    environ: dict[str, str] = {}
    config = PluginConfig(drafter="ngram", gamma=5, quantization="int8")
    config.to_env(environ)
    assert PluginConfig.from_env(environ) == config
    assert PluginConfig.from_env({}) == PluginConfig()


def test_a_step_has_room_for_the_longest_possible_draft() -> None:
    trained = Settings(drafter="dspark", gamma=7)
    assert trained.plugin_config.longest == 15
    assert replace(trained, gamma=20).plugin_config.longest == 20
    assert replace(trained, lookup=False).plugin_config.longest == 7
    assert replace(trained, drafter="ngram").plugin_config.longest == 7


def test_dtype_follows_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, dtype in (({"avx512_bf16"}, "bfloat16"), ({"amx_bf16"}, "bfloat16"), ({"avx512f"}, "float32")):
        monkeypatch.setattr(hardware, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert Settings(device="cpu").resolved_dtype == dtype
        assert hardware.faster_dtype("cpu") == dtype
        assert hardware.faster_dtype("cuda:1") == "bfloat16"
    assert Settings(device="cpu", dtype="bfloat16").resolved_dtype == "bfloat16"


def test_kv_bytes_per_token() -> None:
    llama = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert memory.kv_bytes_per_token(llama, 2) == 2 * 30 * 3 * 64 * 2
    assert memory.kv_bytes_per_token(llama | {"head_dim": 128}, 2) == 2 * 30 * 3 * 128 * 2
    latent = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert memory.kv_bytes_per_token(latent, 2) == 61 * 576 * 2


def test_weights_are_counted_in_the_type_they_are_loaded_as(smollm2: Model) -> None:
    half, full = target.weight_bytes(smollm2, 2), target.weight_bytes(smollm2, 4)
    assert full == 2 * half
    assert half == pytest.approx(134_515_008 * 2, rel=1e-3)


def test_the_kv_cache_is_sized_by_free_memory(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = memory.kv_bytes_per_token(smollm2.config, 2)

    def tokens(free_gib: float, **settings: object) -> int | None:
        monkeypatch.setattr(hardware, "available_memory", lambda: int(free_gib * 2**30))
        plan = memory.plan(Settings(**CPU, **settings), smollm2)
        assert plan.reason.startswith(f"KV cache of {plan.max_total_tokens} tokens, ")
        assert ("--max-total-tokens" in plan.reason) == ("max_total_tokens" in settings)
        assert ("32 requests of 1024 tokens" in plan.reason) == (free_gib == 64 and not settings)
        return plan.max_total_tokens

    assert tokens(64) == memory.REQUESTS * memory.REQUEST_TOKENS + memory.PREFIX_TOKENS
    assert tokens(64, max_running_requests=4) == 4 * memory.REQUEST_TOKENS + memory.PREFIX_TOKENS
    assert tokens(64, max_running_requests=1000) == memory.DEFAULT_KV_BYTES // per_token
    assert tokens(64, max_running_requests=1, context_length=100_000) == 100_000
    assert tokens(2.5) < tokens(64)
    assert tokens(4, max_total_tokens=1000) == 1000
    refuses("too little memory", tokens, 1)
    refuses("lower --max-total-tokens", tokens, 4, max_total_tokens=1_000_000)


@pytest.fixture(scope="module")
def sglang_args():
    from outrider.server.plugin import activate

    activate()
    from outrider.server.processes import sglang_args

    return sglang_args


def test_context_never_exceeds_the_cache(sglang_args, smollm2: Model) -> None:
    arguments = sglang_args.build(Settings(**CPU), smollm2, memory.MemoryPlan(2000), engines=1)
    assert arguments.context_length == arguments.max_total_tokens == 2000
    arguments = sglang_args.build(Settings(**CPU), smollm2, memory.MemoryPlan(100_000), engines=1)
    assert arguments.context_length == 8192


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metrics_port": 30000}, "--metrics-port is --port"),
        ({"metrics_port": 0}, "--metrics-port is a number from 1 to 65535"),
        ({"max_queued_requests": 0}, "--max-queued-requests is a number from 1"),
        ({"max_queue_seconds": 0}, "--max-queue-seconds is a number from 0.1"),
        ({"max_request_seconds": -1}, "--max-request-seconds is a number from 0.1"),
        ({"max_stall_seconds": 0}, "--max-stall-seconds is a number from 1"),
        ({"max_total_tokens": 255}, "--max-total-tokens is a number from 256"),
        ({"unmasking_threshold": 1.5}, "--unmasking-threshold is a number from"),
        ({"unmasking_tokens": 0}, "--unmasking-tokens is a number from 1"),
        ({"ssl_keyfile": "key"}, "need --ssl-certfile"),
        ({"ssl_ca_certs": "authorities"}, "need --ssl-certfile"),
    ],
)
def test_impossible_values(values: dict[str, object], message: str) -> None:
    refuses(message, Settings, **values)


def test_flags_for_sglang(sglang_args) -> None:
    assert sglang_args.parse_flags(["--schedule-policy", "fcfs"]) == {"schedule_policy": "fcfs"}
    for backend in ("xgrammar", "none"):
        assert sglang_args.parse_flags(["--grammar-backend", backend]) == {"grammar_backend": backend}
    for flags, message in (
        (["--port", "1"], "say --port before the --"),
        (["--tokenizer-worker-num", "2"], "is not available here: one tokenizer process"),
        (["--dp-size", "2"], "say --engines before the --"),
        (["--enable-custom-logit-processor"], "no code from requests"),
        (["--trust-remote-code"], "--trust-remote-code is not available here: no code from models"),
        (["--ssl-certfile", "x"], "say --ssl-certfile before the --"),
        (["--max-queued-requests", "1"], "say --max-queued-requests before the --"),
        (["--grammar-backend", "llguidance"], "--grammar-backend llguidance is not available here: only xgrammar's"),
        (["--grammar-backend", "outlines"], "--grammar-backend outlines is not available here: only xgrammar's"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--enable-dp-attention"], "--enable-dp-attention is not available here: all ranks verify the same drafts"),
        (["--pp-size", "2"], "--pp-size is not available here: a step is planned as one forward of all layers"),
        (["--dllm-algorithm", "LowConfidence"], "say --unmasking before the --"),
        (["--dllm-algorithm-config", "x.yaml"], "say --unmasking before the --"),
        (["--no-dllm-fdfo"], "--dllm-fdfo is not available here"),
    ):
        refuses(message, sglang_args.parse_flags, flags)


@pytest.mark.parametrize("flags", [
    "--enable-hierarchical-cache", "--hicache-storage-backend file", "--enable-lmcache", "--lmcache-config-file x",
    "--enable-flexkv", "--flexkv-config-file x", "--enable-unified-cache-external-linker", "--radix-cache-backend x",
    "--enable-hisparse",
])  # fmt: skip
def test_a_cache_restored_without_our_states_is_refused(sglang_args, flags: str) -> None:
    message = f"SGLang's {flags.split()[0]} is not available here: it brings back keys and values alone"
    refuses(message, sglang_args.parse_flags, flags.split())


@pytest.mark.parametrize(("command", "flag", "replacement"), FORMER)
def test_a_former_flag_is_answered_with_what_replaces_it(
    command: str, flag: str, replacement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), f"{flag}=3"]) == 1
    assert capsys.readouterr().err == f"outrider: `{flag}` is gone: use {replacement}\n"
