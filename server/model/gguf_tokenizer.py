"""The tokenizer in a GGUF file, written as transformers reads it.

Transformers' own reading of such a file takes an unknown split for GPT-2's, and orders unlisted merges differently.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from .gguf_file import GgufFile

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are found in a text before it is split."""
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SIGNS, SPACES = r" ?[^\s\p{L}\p{N}]+", r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{SIGNS}[\r\n]*|{SPACES}"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
WORDS = [rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]{some}[{LOWER}]{more}" for some, more in ("*+", "+*")]
"""A word with a lower case letter, else one of capitals; a capital after a lower case letter begins a word."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a text is split before it is encoded.

    pattern: of the pieces; None for GPT-2's. digits: each is a piece. whole: a piece that is a token stays one whatever
    the merges say. begins: texts begin with `bos`, unless the file says otherwise. composed: the text is brought to
    Unicode's composed form (NFC).
    """

    pattern: str | None = None
    digits: bool = False
    whole: bool = False
    begins: bool = False
    composed: bool = False


GPT_2, DIGITS, CL100K = Split(), Split(digits=True), Split(LLAMA_3)
LLAMA_BPE = Split(LLAMA_3, whole=True, begins=True)
QWEN_2 = Split(LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}"), composed=True)
TEKKEN = Split("|".join([*WORDS, r"\p{N}", SIGNS + r"[\r\n/]*", SPACES]), whole=True, begins=True)
O200K = Split("|".join([*(word + CONTRACTIONS + "?" for word in WORDS), r"\p{N}{1,3}", SIGNS + r"[\r\n/]*", SPACES]))
SPLITS = {
    "gpt-2": GPT_2,
    "olmo": GPT_2,
    "phi-2": GPT_2,
    "smollm": DIGITS,
    "refact": DIGITS,
    "starcoder": DIGITS,
    "llama-bpe": LLAMA_BPE,
    "llama3": LLAMA_BPE,
    "llama-v3": LLAMA_BPE,
    "dbrx": CL100K,
    "smaug-bpe": CL100K,
    "qwen2": QWEN_2,
    "deepseek-r1-qwen": QWEN_2,
    "tekken": TEKKEN,
    "gpt-4o": O200K,
}
"""Splits by the names of llama.cpp's converter: Granite has refact, SmolLM3 smaug-bpe, OLMo 2 and Phi-4 dbrx,
Phi-4-mini gpt-4o, Mistral since Nemo tekken. A file without a name in this table is refused."""


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


def end_tokens(file: GgufFile) -> list[int]:
    """Return tokens that end an answer: of a text, a turn, a message. Many files name only some of them."""
    tokens = [file.number(f"tokenizer.ggml.{name}_token_id", -1) for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(token for token in tokens if token >= 0))


def _byte_pairs(file: GgufFile, longest: int) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name, tokens = file.text("tokenizer.ggml.pre", "default"), file.value("tokenizer.ggml.tokens", [])
    if name not in SPLITS:
        raise UserError(f"{file.path}: texts split by {name!r} are not supported, only {', '.join(SPLITS)}")
    split = SPLITS[name]
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges", [])]
    words = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(words, merges, ignore_merges=split.whole))
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    steps += [pre_tokenizers.Split(Regex(split.pattern), "isolated")] if split.pattern else []
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    _add_found_first(file, tokenizer)
    return _finish(file, tokenizer, longest, split.begins)


def _sentence_pieces(file: GgufFile, longest: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    names = ("tokens", "scores", "merges", "unknown_token_id")
    tokens, scores, listed, unknown = (file.value(f"tokenizer.ggml.{name}") for name in names)
    merges = _merges(tokens, scores) if listed is None else [tuple(merge.split(" ")) for merge in listed]
    words = {token: i for i, token in enumerate(tokens)}
    unknown_token = None if unknown is None else tokens[unknown]
    tokenizer = Tokenizer(models.BPE(words, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True))
    # A space also follows a special token, as in llama.cpp and in the models' training.
    prefix = file.value("tokenizer.ggml.add_space_prefix", True)
    before = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    without = [decoders.Strip(content=" ", left=1)] if prefix else []
    bytes_ = [decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*bytes_, decoders.Replace("▁", " "), *without])
    _add_found_first(file, tokenizer)
    return _finish(file, tokenizer, longest, begins=True)


def _merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that together form a token, ordered by its score, highest first."""
    score, merges = dict(zip(tokens, scores, strict=True)), []
    for token in score:
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in score and pair[1] in score]
        merges += sorted(pairs, key=lambda pair: (score[pair[0]], score[pair[1]]), reverse=True)
    return sorted(merges, key=lambda pair: score[pair[0] + pair[1]], reverse=True)


def _add_found_first(file: GgufFile, tokenizer: Any) -> None:
    """Add the tokens that are found in a text before it is split."""
    from tokenizers import AddedToken

    tokens, kinds = file.value("tokenizer.ggml.tokens", []), file.value("tokenizer.ggml.token_type", [])
    added = [(i, kind) for i, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False, special=kind == CONTROL) for i, kind in added])


def _finish(file: GgufFile, tokenizer: Any, longest: int, begins: bool) -> Any:
    """Add the special tokens. begins: texts begin with `bos`, unless the file says otherwise."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokens, special = file.value("tokenizer.ggml.tokens", []), {}
    special_ids = {
        name: file.number(f"tokenizer.ggml.{gguf_name}_token_id", -1)
        for name, gguf_name in (("bos", "bos"), ("pad", "padding"), ("unk", "unknown"))
    }
    for name, token in {**special_ids, "eos": next(iter(end_tokens(file)), -1)}.items():
        if 0 <= token < len(tokens):
            special[f"{name}_token"] = tokens[token]
    if file.value("tokenizer.ggml.add_bos_token", begins) and "bos_token" in special:
        first = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", first, "$B:1"], special_tokens=[(first, tokens.index(first))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=longest, clean_up_tokenization_spaces=False, **special
    )
