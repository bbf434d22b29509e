"""The small target has several likely tokens at each position: otherwise tests with it would have little power."""

import torch
from small_target import END, SmallTarget

PLACES = 40


def test_its_answers_vary(small_target: SmallTarget, prompts: list[str]) -> None:
    ids = [small_target.tokenizer(prompt)["input_ids"] for prompt in prompts]
    sure, greedy = [], [found[:12] for found in ids if len(found) >= 12][:32]
    for _ in range(PLACES):
        logits = small_target.logits(greedy)
        sure.append(logits.softmax(-1).amax(-1))
        greedy = [[*text, int(row.argmax())] for text, row in zip(greedy, logits, strict=True)]
    assert 0.2 < float(torch.cat(sure).mean()) < 0.6
    answers = [text[-PLACES:] for text in greedy]
    assert len({tuple(answer) for answer in answers}) == len(answers)
    assert 0 < sum(END in answer for answer in answers) < len(answers)
    assert sum(len({*answer}) for answer in answers) > PLACES / 2 * len(answers)
