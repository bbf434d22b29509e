"""The small target's tokenizer round-trips text, and each position has several likely tokens."""

import pytest
import torch
from exact_answers import Rules, answer_probs
from small_target import END, VOCAB, SmallTarget

PLACES = 40


@pytest.fixture(scope="module")
def texts(small_target: SmallTarget, prompts: list[str]) -> list[list[int]]:
    ids = [small_target.tokenizer(prompt)["input_ids"] for prompt in prompts]
    return [found[:12] for found in ids if len(found) >= 12][:32]


def test_text_goes_through_its_tokenizer_and_back(small_target: SmallTarget, prompts: list[str]) -> None:
    tokenizer = small_target.tokenizer
    assert len(tokenizer) == VOCAB
    for text in [*prompts, "Naïve 😀\n\n\tx = 1", "<|im_start|>user\nha<|im_end|>"]:
        ids = tokenizer(text)["input_ids"]
        assert max(ids) < VOCAB
        assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ha"}], tokenize=False)
    assert "<|im_start|>user\nha<|im_end|>" in chat


def test_its_answers_vary(small_target: SmallTarget, texts: list[list[int]]) -> None:
    sure, greedy = [], [*texts]
    for _ in range(PLACES):
        logits = small_target.logits(greedy)
        sure.append(logits.softmax(-1).amax(-1))
        greedy = [[*text, int(row.argmax())] for text, row in zip(greedy, logits, strict=True)]
    assert 0.2 < float(torch.cat(sure).mean()) < 0.6
    answers = [text[-PLACES:] for text in greedy]
    assert len({tuple(answer) for answer in answers}) == len(answers)
    assert 0 < sum(END in answer for answer in answers) < len(answers)
    assert sum(len({*answer}) for answer in answers) > PLACES / 2 * len(answers)


def test_whole_answers_add_up(small_target: SmallTarget, texts: list[list[int]]) -> None:
    rules = Rules(top_k=3, temperature=0.9)
    probs = answer_probs(small_target.logits, texts[0], 4, rules)
    assert len(probs) == 3**4
    assert sum(probs.values()) == pytest.approx(1.0)
    first = small_target.logits([texts[0]])[0].topk(3).indices.tolist()
    assert {answer[0] for answer in probs} == {*first}
