"""Block diffusion equals plain torch in float32, token for token, for any prompt length, batch and cache state."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import openai
import pytest
import stock_dllm
import torch
from block_outcomes import enumerated, top_chances
from chi_square import p_value
from diffusion_servers import ALL, POOL, Served, check_spiffy, serve
from metrics_page import metric, until_retracted
from running import environment, wait_until
from tiny_diffusion import MASK, PROMPTS, Reference, TinyDiffusion
from transformers import AutoTokenizer

from outrider.kernels.sampling import Rules
from outrider.server.plugin.diffusion.policy import Static, ThresholdUnmasking, noise_keys, predict, step, steps_of
from outrider.server.plugin.diffusion.target import FAMILIES

SDAR = TinyDiffusion(tied=False)
SHIFTED = TinyDiffusion(architecture="LlamaForCausalLM", block_size=8, shift=True, context_mask="causal")
VARIANTS = {
    f"{'tied' if tied else 'untied'}, block {block}, {unmasking}, {'shared' if shared else 'no shared'} prefixes": (
        TinyDiffusion(tied=tied, block_size=block), unmasking, shared
    )
    for tied, block, unmasking, shared in product((True, False), (4, 32), (0.9, None), (True, False))
} | {
    "OPDLM": (TinyDiffusion(architecture="A2DQwen3LMHeadModel"), 0.3, True),
    "Fast-dLLM v2": (
        TinyDiffusion(architecture="Fast_dLLM_QwenForCausalLM", block_size=16, shift=True, tied=False, head=16),
        None,
        True,
    ),
    "SDAR's experts": (TinyDiffusion(architecture="SDARMoeForCausalLM"), 0.3, True),
    "LLaDA2": (TinyDiffusion(architecture="LLaDA2MoeModelLM", block_size=32, tied=False), 0.3, True),
}  # fmt: skip


@pytest.fixture(scope="module")
def sdar_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """SDAR unchanged, with shared prefixes; a prompt of more than 32 tokens takes several rounds."""
    folder = tmp_path_factory.mktemp("sdar")
    yield from serve(folder, SDAR, "--chunked-prefill-size", "32", "--max-running-requests", "8", threshold=0.3)


@pytest.fixture(scope="module")
def shifted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A converted Llama with causal context."""
    yield from serve(tmp_path_factory.mktemp("shifted"), SHIFTED, "--disable-radix-cache", threshold=None, per_step=3)


@pytest.fixture(params=["sdar_server", "shifted_server"])
def served(request: pytest.FixtureRequest) -> Served:
    chosen: Served = request.getfixturevalue(request.param)
    return chosen


def test_prompts_of_every_length_one_and_eight_at_a_time(served: Served) -> None:
    block = served.reference.shape.block_size
    prompts = served.prompts([*range(1, 2 * block + 2), 61, 130])
    count = 3 * block + 1
    expected = [served.exact(prompt, count) for prompt in prompts]
    assert len({token for answer in expected for token in answer}) > 20
    assert served.ask_all(prompts, count, 8) == expected
    assert served.ask_all(prompts[::3], count, 1) == expected[::3]


def test_a_seed_decides_alone_and_in_company(served: Served) -> None:
    prompts = served.prompts([5, 9, 40, 17, 33, 21, 12, 29])
    options = {"temperature": 1.0, "top_p": 0.95, "top_k": 100}
    together = served.ask_all(prompts, 20, 8, seed=7, **options)
    assert served.ask_all(prompts[:4], 20, 1, seed=7, **options) == together[:4]
    assert served.ask_all(prompts[:4], 20, 1, seed=8, **options) != together[:4]
    assert served.ask_all(prompts[:4], 20, 1, **options) != served.ask_all(prompts[:4], 20, 1, **options)


def test_service_levels_leave_the_text_and_are_counted(sdar_server: Served) -> None:
    prompts = sdar_server.prompts([12, 30, 7, 18])
    expected = [sdar_server.exact(prompt, 16) for prompt in prompts]
    counted = "outrider_service_level_requests_total"
    for level, met in ((0.01, "true"), (1e6, "false")):
        before = metric(sdar_server.server.url, counted, met=met)
        assert sdar_server.ask_all(prompts, 16, 4, min_tokens_per_second=level) == expected
        assert metric(sdar_server.server.url, counted, met=met) == before + 4


def drawn_by_policy(served: Served, prompt: list[int], seed: int, blocks: int, temperature: float) -> list[int]:
    """The answer up to the end of `blocks` blocks: the reference's logits and the policy's own functions."""
    reference, block, mask = served.reference, served.reference.shape.block_size, served.reference.mask
    policy = Static(served.per_step) if served.threshold is None else ThresholdUnmasking(served.threshold)
    tokens = list(prompt)
    for _ in range(blocks):
        start = len(tokens) // block * block
        state = torch.tensor([tokens[start:] + [mask] * (start + block - len(tokens))])
        while bool((state == mask).any()):
            masked = state == mask
            logits = reference.says(tokens[:start] + state[0].tolist(), start // block)[masked[0]]
            positions, seeds = start + masked[0].nonzero()[:, 0], torch.full((len(logits),), seed)
            steps = steps_of(state, mask).expand(len(logits)).contiguous()
            rules = Rules(torch.full((len(logits),), temperature))
            drawn, confidence = state.clone(), torch.zeros(state.shape)
            drawn[masked], confidence[masked] = predict(logits, rules, noise_keys(seeds, positions, steps), mask)
            state = step(policy, state, drawn, confidence, mask)
        tokens = tokens[:start] + state[0].tolist()
    return tokens[len(prompt) :]


def test_a_seeded_answer_equals_the_policys_draw(served: Served) -> None:
    block = served.reference.shape.block_size
    for seed, prompt in enumerate(served.prompts([3, block, 2 * block - 1, 21])):
        expected = drawn_by_policy(served, prompt, seed, 3, 0.8)
        assert served.ask(prompt, len(expected), temperature=0.8, seed=seed) == expected


def test_blocks_without_a_seed_are_distributed_as_enumerated(sdar_server: Served) -> None:
    """Two open tokens end the block and another block follows, so complete states are drafted."""
    top_k, total, mask = 4, 1024, sdar_server.reference.mask
    drafted = metric(sdar_server.server.url, "outrider_drafted_states_total")
    (prompt,) = sdar_server.prompts([10])

    def chances(state: tuple[int, ...]) -> list[dict[int, float]]:
        return top_chances(sdar_server.reference.says([*prompt[:8], *state], 2), mask, top_k)

    def reveals(chance: Mapping[int, float]) -> set[int]:
        return {max(chance, key=chance.__getitem__), *(i for i in chance if chance[i] > sdar_server.threshold)}

    expected = enumerated(chances, reveals, (*prompt[8:], mask, mask), mask)
    counts: Counter = Counter()
    while counts.total() < total:
        body = {"prompt": prompt, "max_tokens": 3, "temperature": 1, "top_k": top_k, "ignore_eos": True, "n": 128}
        for choice in sdar_server.post(body | {"return_token_ids": True}).json()["choices"]:
            counts[*prompt[8:], *choice["token_ids"][:2]] += 1
    assert p_value(counts, expected, total) > 1e-4
    assert metric(sdar_server.server.url, "outrider_drafted_states_total") > drafted


def test_a_full_cache_retracts_requests(served: Served) -> None:
    """Six requests run at a time, where three fill the cache."""
    prompts = served.prompts([40 + i for i in range(6)])
    count = POOL // 3 - 45
    expected = [served.exact(prompt, count) for prompt in prompts]

    def ask() -> None:
        assert served.ask_all(prompts, count, 6) == expected

    until_retracted(served.server.url, ask)
    wait_until(lambda: served.cached()["used"] == 0, 30)


def test_the_largest_request_fits(served: Served) -> None:
    (prompt,) = served.prompts([24])
    count = POOL - 24 - served.reference.shape.block_size - 2  # SGLang reserves two tokens
    assert len(served.ask(prompt, count)) == count
    wait_until(lambda: served.cached()["used"] == 0, 30)


def test_aborts_free_the_cache_and_leave_other_answers(served: Served) -> None:
    prompts, client = served.prompts([3, 30, 90, 200, 50]), served.server.client()
    expected = served.exact(prompts[-1], 12)
    body = {"model": "tiny", "max_tokens": 250, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
    for stop_after in (0, 1, 3, 8):
        streams = [client.completions.create(prompt=prompt, **body) for prompt in prompts[:-1]]
        for stream in streams:
            for _ in zip(range(stop_after), stream, strict=False):
                pass
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(served.ask, prompts[-1], 12)
            for stream in streams:
                stream.close()
            assert other.result() == expected
    wait_until(lambda: served.cached()["used"] == 0, 30)


def test_stops_and_limits_are_obeyed(served: Served) -> None:
    (prompt,) = served.prompts([11])
    whole = served.exact(prompt, 30)
    for count in (1, 2, 7):
        answer = served.post({"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}).json()
        assert answer["usage"]["completion_tokens"] == count
        assert answer["choices"][0]["finish_reason"] == "length"
    at = next(i for i in range(3, 30) if whole[i] not in whole[:i])
    body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    answer = served.post(body | {"stop_token_ids": [whole[at]], "ignore_eos": False}).json()
    assert answer["usage"]["completion_tokens"] == at + 1
    assert answer["choices"][0]["finish_reason"] == "stop"
    text = served.post(body).json()["choices"][0]["text"]
    stop = text[5:8]
    assert served.post(body | {"stop": stop}).json()["choices"][0]["text"] == text[: text.index(stop)]


def test_options_that_block_diffusion_lacks_are_refused(sdar_server: Served) -> None:
    mask = sdar_server.tokenizer.mask_token_id
    for fields, reason in (
        ({"frequency_penalty": 0.5}, "'frequency_penalty': a block-diffusion model draws tokens before"),
        ({"logit_bias": {"5": 1}}, "'logit_bias': block diffusion applies no bias"),
        ({"regex": "a+"}, "'regex': an answer in its form cannot be enforced"),
        ({"response_format": {"type": "json_object"}}, "'response_format': an answer in its form"),
        ({"logprobs": 1}, "'logprobs': the tokens of a block-diffusion model have no probability"),
        ({"min_tokens": 3}, "'min_tokens'"),
        ({"prompt": f"a {MASK} b"}, f"the mask token ({MASK})"),
        ({"prompt": [4, mask, 4]}, f"the mask token ({MASK})"),
    ):
        answer = sdar_server.post({"prompt": "a", "max_tokens": 2} | fields)
        assert answer.status_code == 400, fields
        assert reason in answer.json()["error"]["message"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    client = sdar_server.server.client()
    with pytest.raises(openai.BadRequestError, match="'tools'"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], tools=[tool])
    with pytest.raises(openai.BadRequestError, match="mask token"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": f"a {MASK}"}])


def test_a_long_prompt_takes_few_rounds(served: Served) -> None:
    (prompt,) = served.prompts([400])
    served.ask(prompt, 1)
    assert metric(served.server.url, "sglang:prompt_tokens_total") > 400
    wait_until(lambda: served.live()["requests"]["running"] == 0, 30)


@pytest.mark.server
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive serves every variant")
    shape, threshold, shared = VARIANTS[name]
    flags = () if shared else ("--disable-radix-cache",)
    for served in serve(tmp_path, shape, *ALL, *flags, threshold=threshold):
        test_prompts_of_every_length_one_and_eight_at_a_time(served)
        test_a_seed_decides_alone_and_in_company(served)
        test_aborts_free_the_cache_and_leave_other_answers(served)
        check_spiffy(served)


@pytest.mark.server
def test_the_reference_is_sglangs_own_low_confidence(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """SGLang cannot load SDAR with tied weights, and reads no mask token from config.json."""
    if not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive runs SGLang's own dllm mode beside ours")
    mask = FAMILIES["SDARForCausalLM"].mask_token_id
    shape = TinyDiffusion(tied=False, vocab_size=mask + 3)
    model = shape.write(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = Reference(shape, mask)
    tokens = tokenizer(PROMPTS.read_text(), add_special_tokens=False)["input_ids"]
    prompts = [tokens[7 * i : 7 * i + length] for i, length in enumerate((4, 5, 6, 7, 8, 33, 61))]
    command = [sys.executable, stock_dllm.__file__, str(model), "0.5", "21"]
    done = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-2000:]
    expected = [reference.answer(prompt, 21, threshold=0.5) for prompt in prompts]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
