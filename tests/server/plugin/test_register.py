"""Hooks into SGLang."""

from types import SimpleNamespace

from sglang.srt import server_args
from sglang.srt.layers.attention import attention_registry

from outrider.server.plugin import flat_attention
from outrider.server.plugin.attention_backends import BACKENDS
from outrider.server.plugin.cuda import flashinfer
from outrider.server.plugin.cuda.padding import PaddingRows
from outrider.server.plugin.hooks.register import Once, _register_gpu_attention

METHODS = "init_forward_metadata", "init_forward_metadata_out_graph", "forward_extend"


def test_registration_happens_once_for_the_same_arguments() -> None:
    calls = []

    def load(path: str, **options: object) -> object:
        calls.append((path, options))
        return object()

    once = Once()
    first = once(load, "model", mode="auto", revision=None)
    assert once(load, "model", revision=None, mode="auto") is first
    assert once(load, "model", mode="slow", revision=None) is not first
    assert len(calls) == 2


def test_gpus_have_every_offered_backend_and_our_flashinfer(monkeypatch) -> None:
    made = {}
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", dict(attention_registry.ATTENTION_BACKENDS))
    monkeypatch.setattr(server_args, "ATTENTION_BACKEND_CHOICES", [*server_args.ATTENTION_BACKEND_CHOICES])
    monkeypatch.setattr(server_args, "add_attention_backend_choices", server_args.ATTENTION_BACKEND_CHOICES.extend)
    for name, module in (("RaggedFlashInferBackend", flashinfer), ("FlatAttentionBackend", flat_attention)):
        monkeypatch.setattr(module, name, lambda runner, name=name, **_: made.setdefault(name, runner))
    backends, methods = attention_registry.ATTENTION_BACKENDS, {name: name.upper for name in METHODS}
    monkeypatch.setitem(backends, "flashinfer", lambda _: made.setdefault("SGLang's", 1))
    for name in ("fa3", "trtllm_mha"):
        monkeypatch.setitem(backends, name, lambda _: SimpleNamespace(**methods))
    _register_gpu_attention()
    assert set(BACKENDS) <= set(server_args.ATTENTION_BACKEND_CHOICES) & set(attention_registry.ATTENTION_BACKENDS)
    for name, latent in (("flashinfer", False), ("outrider", False), ("flashinfer", True)):
        attention_registry.ATTENTION_BACKENDS[name](SimpleNamespace(use_mla_backend=latent, init_new_workspace=False))
    assert set(made) == {"RaggedFlashInferBackend", "FlatAttentionBackend", "SGLang's"}
    for name in ("fa3", "trtllm_mha"):
        assert all(isinstance(vars(backends[name](None))[method].__self__, PaddingRows) for method in METHODS)
