"""Models from GGUF files, compared with transformers' reading and with the models that were written, and errors."""

import json
import re
from pathlib import Path

import gguf_models
import numpy as np
import pytest
import tiny_gguf
import torch
from gguf_models import LLAMA_3, LLAMA_3_FACTORS, MODELS, PROMPT, logprobs
from refusals import refuses
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from outrider.kernels.blocks import KINDS, BlockRows
from outrider.kernels.cpu import native
from outrider.kernels.linear import PackedWeight, pack, packed_linear
from outrider.kernels.weights import StackedWeight, multiply
from outrider.server.model import gguf_architectures, gguf_model, target
from outrider.server.plugin.loading.gguf_weights import FLOATS, GgufWeights

COMPILED = pytest.mark.skipif(not native.available(), reason="no compiled kernels")
LAYER = "model.layers.1"
LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def theirs(file: Path) -> dict[str, torch.Tensor]:
    """The weights as expanded by transformers."""
    # Its own config of Qwen3 has another head width.
    config = AutoConfig.from_pretrained(gguf_model.prepare(file, file.stem))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, config=config, dtype=torch.bfloat16)
    return model.state_dict()


@pytest.mark.parametrize(
    ("architecture", "kind", "tied"),
    [
        ("llama", "Q4_1", True),
        ("qwen2", "Q4_0", False),
        ("qwen3", "Q8_0", True),
        ("llama", "Q5_0", False),
        ("qwen3", "MXFP4", True),
    ],
)
def test_weights_equal_transformers(tmp_path: Path, architecture: str, kind: str, tied: bool) -> None:
    file = tiny_gguf.write(tmp_path / "tiny.gguf", architecture, kind, tied=tied, kinds={"ffn_down.weight": "F16"})
    model = target.find(str(file))
    assert model.folder is not None
    ours = dict(GgufWeights(model.folder).everything())
    expected = theirs(file)
    assert ours.keys() == expected.keys() - ({"lm_head.weight"} if tied else set())
    for name, tensor in ours.items():
        assert torch.equal(tensor.bfloat16(), expected[name]), name
    unpacked = AutoModelForCausalLM.from_pretrained(target.plain_folder(str(file))).state_dict()
    assert unpacked.keys() == expected.keys()
    assert all(torch.equal(unpacked[name], expected[name]) for name in expected)


@COMPILED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kinds", [{}, {"attn_v.weight": "MXFP4", "ffn_up.weight": "Q5_1"}], ids=["one", "mixed"])
def test_products_have_the_bits_of_expanded_weights(tmp_path: Path, dtype: torch.dtype, kinds: dict[str, str]) -> None:
    file = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", "Q4_1", kinds=kinds)
    expected = theirs(file)
    weights = GgufWeights(gguf_model.prepare(file, "tiny"))
    for layer in (*(f"{LAYER}.{name}" for name in LINEARS), "lm_head"):
        ours = weights.prepared(layer, dtype)
        whole = torch.cat([expected[name] for name in weights.parts(layer)]).to(dtype)
        several = bool(kinds) and layer.endswith(("qkv_proj", "gate_up_proj"))
        assert isinstance(ours, StackedWeight) if several else isinstance(ours, PackedWeight) and ours.kind >= 0
        x = torch.randn(5, whole.shape[1], generator=torch.Generator().manual_seed(3)).to(dtype)
        assert torch.equal(multiply(x, ours), packed_linear(x, pack(whole))), layer


def test_all_blocks_of_the_kernels_are_served() -> None:
    assert set(gguf_model.TYPES) == {*FLOATS, *(kind for kind in KINDS if not kind.startswith("GROUPS_"))}


def test_rows_of_the_embedding(tmp_path: Path) -> None:
    file = tiny_gguf.write(tmp_path / "tiny.gguf", kind="Q8_0")
    rows = GgufWeights(gguf_model.prepare(file, "tiny")).rows("lm_head")
    expected = theirs(file)["model.embed_tokens.weight"]
    assert isinstance(rows, BlockRows)
    assert rows.shape == expected.shape
    ids = torch.tensor([3, 0, 17, 3])
    assert torch.equal(rows[ids], expected[ids])
    first = rows.first(9)
    assert first.shape == (9, rows.depth)
    assert torch.equal(first[torch.arange(5, 9)], expected[5:9])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_config(tmp_path: Path, architecture: str) -> None:
    model = target.find(str(tiny_gguf.write(tmp_path / "my-model.Q4_1.gguf", architecture)))
    config = AutoConfig.from_pretrained(model.path)
    assert (model.name, model.context_length) == ("my-model.Q4_1", 256)
    assert config.model_type == architecture
    assert config.head_dim == tiny_gguf.HEAD
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert (config.eos_token_id, config.vocab_size) == (2, len(tiny_gguf.tokens()))


@pytest.mark.parametrize(
    ("ends", "ids", "token"),
    [
        ({}, None, None),
        ({"eot": 2}, 2, "<|im_end|>"),
        ({"eos": 0, "eot": 2}, [0, 2], "<|endoftext|>"),
        ({"eos": 2, "eot": 2, "eom": 1}, [2, 1], "<|im_end|>"),
    ],
)
def test_each_token_that_ends_an_answer(tmp_path: Path, ends: dict[str, int], ids: object, token: str | None) -> None:
    file = tiny_gguf.write(tmp_path / "m.gguf", tokenizer=lambda w: tiny_gguf.add_tokenizer(w, "qwen2", ends))
    folder = gguf_model.prepare(file, "ends")
    assert AutoConfig.from_pretrained(folder).eos_token_id == ids
    assert json.loads((folder / "generation_config.json").read_text()).get("eos_token_id") == ids
    assert AutoTokenizer.from_pretrained(folder).eos_token == token


def test_recommended_sampling(tmp_path: Path) -> None:
    said = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": "much"}
    file = tiny_gguf.write(tmp_path / "model.gguf", fields=said)
    assert sampling(gguf_model.prepare(file, "said")) == {"temperature": 0.6, "top_k": 20}
    known = {"temperature": 0.2, "top_p": 0.9}
    assert sampling(gguf_model.prepare(file, "both", known)) == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    assert sampling(gguf_model.prepare(tiny_gguf.write(tmp_path / "silent.gguf"), "silent")) == {}


def sampling(folder: Path) -> dict[str, float]:
    generation = json.loads((folder / "generation_config.json").read_text())
    return {name: generation[name] for name in gguf_model.SAMPLING if name in generation}


def test_memory_is_that_of_the_blocks(tmp_path: Path) -> None:
    model = target.find(str(tiny_gguf.write(tmp_path / "tiny.gguf", kind="Q4_1", tied=False)))
    matrices = sum(t.size for t in tiny_gguf.tensors("llama", tied=False).values() if t.ndim == 2)
    vectors = sum(t.size for t in tiny_gguf.tensors("llama", tied=False).values() if t.ndim == 1)
    assert target.weight_bytes(model, 2, in_blocks=True) == matrices // 32 * KINDS["Q4_1"] + 2 * vectors
    assert target.weight_bytes(model, 4) == 4 * (matrices + vectors)


def test_llama_3_scaling_is_found_in_its_factors(tmp_path: Path) -> None:
    assert LLAMA_3_FACTORS.max() > 1
    file = tiny_gguf.write(tmp_path / "scaled.gguf", more={"rope_freqs.weight": LLAMA_3_FACTORS})
    parameters = AutoConfig.from_pretrained(target.find(str(file)).path).rope_parameters
    assert parameters == pytest.approx(LLAMA_3)
    odd = tiny_gguf.write(tmp_path / "odd.gguf", more={"rope_freqs.weight": LLAMA_3_FACTORS[::-1].copy()})
    refuses("are not Llama 3's", target.find, str(odd))


@pytest.mark.parametrize(
    ("split", "digits"), [("qwen2", ["1", "2", "3"]), ("llama-bpe", ["12", "3"]), ("gpt-2", ["12", "3"])]
)
def test_tokenizer(tmp_path: Path, split: str, digits: list[str]) -> None:
    folder = target.find(str(tiny_gguf.write(tmp_path / "tiny.gguf", split=split))).path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(tiny_gguf.TEXT)["input_ids"]
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert pieces[:2] == ["hello", "Ġw"]
    assert [piece for piece in pieces if piece.strip("Ġ").isdigit()] == digits
    assert pieces[-1] == "<think>"  # one token, though not a special one
    assert tokenizer.decode(ids, skip_special_tokens=True) == tiny_gguf.TEXT
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>hello<|im_end|>"


def test_files_that_cannot_be_served(tmp_path: Path) -> None:
    def fails(file: Path) -> str:
        return refuses("", target.find, str(file))

    file = tiny_gguf.write(tmp_path / "whole.gguf")
    content, cut = file.read_bytes(), tmp_path / "cut.gguf"
    for length in (6, 100, len(content) // 4, len(content) - 1000):
        cut.write_bytes(content[:length])
        assert "is not a complete GGUF file; fetch it again" in fails(cut), length
    cut.write_bytes(b"PK\3\4" + content[4:])
    assert "is not a GGUF file" in fails(cut)
    kind = content.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 2 * 8
    cut.write_bytes(content[:kind] + (999).to_bytes(4, "little") + content[kind + 4 :])
    assert "a tensor of an unknown type: 999" in fails(cut)
    cut.write_bytes(content[:kind] + (24).to_bytes(4, "little") + content[kind + 4 :])
    assert "blk.0.attn_q.weight is of type I8, only F32, F16, BF16, Q4_0" in fails(cut)
    cases = {
        "'gpt-oss' is not supported from GGUF files, only llama, qwen2, qwen3": {"architecture": "gpt-oss"},
        "a llama model has no blk.0.attn_sinks.weight": {"more": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}},
        "texts split by 'poro' are not supported": {"split": "poro"},
        "texts split by 'default' are not supported": {"split": "default"},
        "mixtures of experts": {"fields": {"llama.expert_count": 8}},
        "scaled by 'longrope'": {"fields": {"llama.rope.scaling.type": "longrope"}},
        "scaled by 'yarn' with yarn_ext_factor": {
            "fields": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}
        },
        "heads that are rotated as a whole": {"fields": {"llama.rope.dimension_count": 16}},
        "OLMo 3's layers with a window": {"architecture": "olmo2", "fields": {"olmo2.attention.sliding_window": 64}},
        "one of 3 parts": {"fields": {"split.count": 3}},
    }
    for message, changes in cases.items():
        assert message in fails(tiny_gguf.write(tmp_path / "odd.gguf", **changes)), message
    assert not list((tmp_path / "cache" / "models").glob("odd*"))


def test_a_replaced_file_is_another_model(tmp_path: Path) -> None:
    file = tiny_gguf.write(tmp_path / "tiny.gguf")
    first = target.find(str(file)).folder
    assert target.find(str(file)).folder == first
    tiny_gguf.write(file, kind="Q8_0")
    assert target.find(str(file)).folder != first


def test_a_split_file(tmp_path: Path) -> None:
    """Any part names all of them; a missing one is named."""
    first, second = (tmp_path / f"tiny-Q4_1-0000{n}-of-00002.gguf" for n in (1, 2))
    whole = tiny_gguf.write(tmp_path / "whole.gguf")
    tiny_gguf.write(first, only=lambda name: not name.startswith("blk.1."), fields={"split.count": 2})
    refuses(r"is one of 2 parts, and .* has no tiny-Q4_1-00002-of-00002.gguf", target.find, str(first))
    tiny_gguf.write(second, only=lambda name: name.startswith("blk.1."), fields={"split.count": 2})
    model = target.find(str(second))
    assert (model.name, model.folder) == ("tiny-Q4_1", target.find(str(first)).folder)
    assert model.folder is not None
    ours = dict(GgufWeights(model.folder).everything())
    expected = dict(GgufWeights(gguf_model.prepare(whole, "whole")).everything())
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


README = Path(__file__).parents[3] / "server" / "README.md"


def test_every_architecture_has_a_model_here() -> None:
    assert {model.architecture for model in MODELS.values()} == gguf_architectures.SUPPORTED.keys()


def test_the_readme_names_all_architectures_and_types() -> None:
    (row,) = re.findall(r"^\| (llama .*) \| (.*) \|$", README.read_text(), re.MULTILINE)
    architectures, types = (re.sub(r" \(.*?\)", "", cell).split(", ") for cell in row)
    assert architectures == list(gguf_architectures.SUPPORTED)
    assert types == list(gguf_model.TYPES)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_written_models(tmp_path: Path, name: str) -> None:
    expected = gguf_models.write(name, tmp_path / "tiny.gguf", "Q8_0")
    folder = target.plain_folder(str(tmp_path / "tiny.gguf"))
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    torch.testing.assert_close(logprobs(ours, PROMPT), logprobs(expected, PROMPT), atol=2e-5, rtol=1e-5)
