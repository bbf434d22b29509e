"""The tokenizer in a GGUF file, written as transformers reads it.

Byte-pair encodings are built here: transformers' own reading splits every text as GPT-2 does, whatever the file names,
takes the wrong end token, and leaves tokens like <think> to be spelled out. SentencePiece's are transformers'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import UserError
from .gguf_file import GgufFile

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are found in a text before it is split."""
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT_2, DIGITS = "gpt-2", "digits"
SPLITS = {
    "default": GPT_2,
    "gpt-2": GPT_2,
    "smollm": DIGITS,
    "llama-bpe": LLAMA_3,
    "llama3": LLAMA_3,
    "llama-v3": LLAMA_3,
    "smaug-bpe": LLAMA_3,
    "qwen2": QWEN_2,
    "deepseek-r1-qwen": QWEN_2,
}
"""Splits of texts before they are encoded, by the names that llama.cpp's converter gives."""


def write(file: GgufFile, folder: Path, longest: int) -> None:
    """Write the tokenizer's files, with the chat template; raises UserError for one of another kind."""
    model = file.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_pairs(file, longest)
    elif model == "llama":
        tokenizer = _sentence_pieces(file, longest)
    else:
        raise UserError(f"{file.path}: tokenizers of kind {model!r} are not supported, only gpt2 and llama")
    tokenizer.chat_template = file.value("tokenizer.chat_template")
    tokenizer.save_pretrained(folder)


def _byte_pairs(file: GgufFile, longest: int) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = file.text("tokenizer.ggml.pre", "default")
    if split not in SPLITS:
        raise UserError(f"{file.path}: texts split by {split!r} are not supported, only {', '.join(SPLITS)}")
    pattern, tokens = SPLITS[split], file.value("tokenizer.ggml.tokens", [])
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges", [])]
    ignores = pattern == LLAMA_3  # a piece that is a token is that token, whatever the merges say
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=ignores))
    if pattern == QWEN_2:
        tokenizer.normalizer = normalizers.NFC()
    by_itself = pattern in (GPT_2, DIGITS)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_itself)
    if pattern == DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    elif by_itself:
        tokenizer.pre_tokenizer = bytes_
    else:
        first = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    types = file.value("tokenizer.ggml.token_type", [])
    added = [(i, kind) for i, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False, special=kind == CONTROL) for i, kind in added])
    return _finish(file, tokenizer, longest, begins=pattern == LLAMA_3)


def _sentence_pieces(file: GgufFile, longest: int) -> Any:
    from transformers.integrations.ggml import GGUFLlamaConverter

    names = {"tokens": "tokens", "scores": "scores", "token_type": "token_type", "merges": "merges"}
    names |= {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "unk_token_id": "unknown_token_id"}
    fields = {name: file.value(f"tokenizer.ggml.{gguf_name}") for name, gguf_name in names.items()}
    given = {name: value for name, value in fields.items() if value is not None}
    prefix = file.value("tokenizer.ggml.add_space_prefix", True)
    converter = GGUFLlamaConverter(given | {"tokenizer_type": "llama", "add_prefix_space": prefix})
    return _finish(file, converter.converted(), longest, begins=True)


def _finish(file: GgufFile, tokenizer: Any, longest: int, begins: bool) -> Any:
    """Add the special tokens. begins: True if texts begin with the first of them where the file does not say."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokens, special = file.value("tokenizer.ggml.tokens", []), {}
    for name, gguf_name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if 0 <= (token := file.number(f"tokenizer.ggml.{gguf_name}_token_id", -1)) < len(tokens):
            special[f"{name}_token"] = tokens[token]
    if file.value("tokenizer.ggml.add_bos_token", begins) and "bos_token" in special:
        first = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", first, "$B:1"], special_tokens=[(first, tokens.index(first))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=longest, clean_up_tokenization_spaces=False, **special
    )
