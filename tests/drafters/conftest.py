from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_drafters import CONFIGS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.drafters.block import BlockConfig

WORDS = ["<unk>", "<s>", "</s>", "user", "assistant", *(f"w{i}" for i in range(91))]


@pytest.fixture(params=sorted(CONFIGS))
def config(request: pytest.FixtureRequest) -> BlockConfig:
    return CONFIGS[request.param]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny operations only lose time in a thread pool."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=1,
            eos_token_id=2, initializer_range=0.3,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.pad_token = "</s>"
    tokenizer.chat_template = (
        "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"
        "{% if add_generation_prompt %}<s> assistant {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder
