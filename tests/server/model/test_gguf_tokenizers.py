"""Tokenizers of GGUF files split texts as llama.cpp does.

The vocabulary is trained on unsplit texts, so a text that is split differently has other tokens.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import tiny_gguf
from gguf import GGUFWriter
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from outrider.server.model import bundled_model, target
from outrider.server.model.gguf_tokenizer import SPLITS

pytestmark = pytest.mark.slow

TEXTS = [
    "Hello world, it's 2024 and they'LL've paid $1234567.89!",
    "  two  spaces\tand\ttabs   \n\n\n  next\r\nline \n",
    "def f(x):\n    return {'a': x**2, \"b\": [1, 22, 333]}  # done\n\n\tpass",
    "https://example.org/a/b?c=1&d=%20#x // comment /* more */\n/\n",
    "早上好，世界！2024年12月31日。 こんにちは、世界。 안녕하세요 세계",
    "naïve café Straße ÉCOLE Ünïcödé Привет МИР Ελλάδα",
    "🎉🎉 emoji 👩‍👩‍👧 flags 🇫🇷 ❤️ end",
    "camelCase HTTPServer XMLHttpRequest2 iPhone15 ABCdefGHI",
    "I'm we're you'd O'Brien 'S 'quoted' don’t",
    "١٢٣ ४५६ Ⅷ ½ x² 10% 3.14e-10 0xFF 1,000,000",
    "a" * 40 + " " * 17 + "!" * 9 + "\n" * 5 + "=" * 12,
    "zebra zebra",
    " leading", "trailing ", " ", "\n", "", "<|im_start|>user\n<think>5</think>",
]  # fmt: skip


RARE = "界🎉²\r"
"""Characters outside all sentence pieces: they are spelled in bytes."""
DEFINED = ["\n", "\n\n", "\n\n\n", "<table>"]
"""Sentence pieces that are found before a text is split, as in Gemma."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


@cache
def across_borders(spelled: bool) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-pair encoding; spelled: as GPT-2 spells bytes."""
    tokenizer = Tokenizer(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if spelled else []
    if spelled:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    # neighbours in other contexts, so that whole texts do not become tokens
    tokenizer.train_from_iterator([text[i : i + 9] for text in TEXTS for i in range(len(text))], trainer)
    words = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(words, key=words.__getitem__), [" ".join(pair) for pair in merges]


def byte_pairs(split: str) -> tuple[list[str], Callable[[GGUFWriter], None]]:
    """A vocabulary and its writer. One token has no merge, so only the right split finds it."""
    words, merges = across_borders(spelled=True)
    assert "zebra" in words
    merges = [merge for merge in merges if merge.replace(" ", "") != "zebra"]
    tokens = [*tiny_gguf.SPECIAL, *words]

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_list(tokens)
        kinds = {word: 4 if word == "<think>" else 3 for word in tiny_gguf.SPECIAL}
        writer.add_token_types([kinds.get(word, 1) for word in tokens])
        writer.add_token_merges(merges)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(False)

    return tokens, add


def sentence_pieces(prefix: bool) -> tuple[list[str], Callable[[GGUFWriter], None]]:
    """prefix: a space before the text, as by Llama 2 and Phi-3."""
    words, _ = across_borders(spelled=False)
    words = [word for word in words if not set(word) & {*RARE, "\n"}]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<start_of_turn>", *DEFINED, *words]

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * (260 + len(DEFINED)) + [-float(i) for i in range(len(words))])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [3] + [4] * len(DEFINED) + [1] * len(words))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(prefix)

    return tokens, add


def written(path: Path, vocabulary: tuple[list[str], Callable[[GGUFWriter], None]]) -> Path:
    words, tokenizer = vocabulary
    embedding = np.zeros((len(words), tiny_gguf.WIDTH), np.float32)
    return tiny_gguf.write(path, kind="F32", tokenizer=tokenizer, more={"token_embd.weight": embedding})


def differing(file: Path, log: Path, texts: list[str]) -> dict[str, Any]:
    """Texts that llama.cpp encodes differently, with both encodings."""
    ours = AutoTokenizer.from_pretrained(target.find(str(file)).path)
    differences = {}
    with llama_cpp.opened(file, log) as reader:
        for text in texts:
            pair = ours.encode(text, add_special_tokens=False), reader.tokens(text)
            if pair[0] != pair[1]:
                differences[text] = [ours.convert_ids_to_tokens(ids) for ids in pair]
    return differences


@pytest.mark.parametrize("split", SPLITS)
def test_texts_are_split_as_llama_cpp_does(tmp_path: Path, split: str) -> None:
    assert differing(written(tmp_path / "tiny.gguf", byte_pairs(split)), tmp_path / "log", TEXTS) == {}


def test_the_texts_tell_all_splits_apart(tmp_path: Path) -> None:
    names = {split: name for name, split in SPLITS.items()}
    encoded = set()
    for name in names.values():
        tokenizer = AutoTokenizer.from_pretrained(target.find(str(written(tmp_path / name, byte_pairs(name)))).path)
        encoded.add(tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS))
    assert len(encoded) == len(names) == 7


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_pieces_equal_llama_cpp(tmp_path: Path, prefix: bool) -> None:
    file = written(tmp_path / "tiny.gguf", sentence_pieces(prefix))
    assert (
        differing(file, tmp_path / "log", [*TEXTS, "<start_of_turn>user\nHi <start_of_turn>", "a <table>\n\n\n\n\nb"])
        == {}
    )


def test_the_embedded_model(tmp_path: Path) -> None:
    assert differing(bundled_model.find_gguf(), tmp_path / "log", TEXTS) == {}
