"""`outrider train dllm` at tiny size, compared with transformers' network with dense masks."""

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from margins import assert_near
from tiny_drafters import DIFFUSION, TERMS
from tiny_training import check_learned, training
from transformers import AutoModelForCausalLM

from outrider.drafters.commands import train
from outrider.drafters.commands.export import export
from outrider.drafters.config_file import CheckpointError
from outrider.drafters.conversion import delta
from outrider.drafters.conversion.blocks import Pack, PackMaker, rising_masks, whole_blocks
from outrider.drafters.conversion.denoise import agreement, denoise
from outrider.drafters.conversion.layout import Layout
from outrider.drafters.conversion.model import ConvertedModel, convert
from outrider.drafters.conversion.run import ConversionRun
from outrider.drafters.training.batches import Tile
from outrider.drafters.training.forward import FrozenTarget
from outrider.drafters.training.loop import Recipe
from outrider.drafters.training.store import Sequence
from outrider.drafters.training.target import TargetModel

MASK, STOP, SIZE, VOCABULARY = 95, 2, 4, 96
SHAPE = replace(
    DIFFUSION, gamma=SIZE, num_layers=6, mask_token_id=MASK, confidence_head=False, qk_norm=False, head_dim=8
)


@pytest.fixture(params=[True, False], ids=["shift", "sdar"])
def layout(request: pytest.FixtureRequest) -> Layout:
    return Layout(SIZE, MASK, request.param)


@pytest.fixture
def target(target_folder: Path) -> TargetModel:
    return TargetModel.load(str(target_folder), dtype=torch.float32)


@pytest.fixture
def model(layout: Layout, target: TargetModel) -> ConvertedModel:
    """Deltas large enough to matter in every layer."""
    torch.manual_seed(1)
    made = convert(target, SHAPE, layout, 3)
    with torch.no_grad():
        for factor in made.deltas().values():
            factor.normal_(std=0.3)
        made.mask.normal_()
    made.merge()
    return made


@pytest.fixture
def frozen(model: ConvertedModel, target: TargetModel) -> FrozenTarget:
    return FrozenTarget(target.embedding, target.head[model.vocab].contiguous())


def answers(count: int = 2, top: int = 5) -> list[Sequence]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for number in range(count):
        prompt, length = 6 + number, 17 + 2 * number
        tokens = torch.randint(3, MASK, (length,), generator=generator)
        tokens[-1] = STOP
        probs = torch.rand(length - prompt, top, generator=generator)
        ids = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:top] for _ in probs])
        answer = Sequence(tokens, prompt, torch.empty(length, 0), ids, probs / probs.sum(1, keepdim=True) * 0.9)
        made.append(whole_blocks(answer, SIZE, {STOP}))
    return made


def pack_of(layout: Layout, sequences: list[Sequence], streams: int = 2) -> Pack:
    maker = PackMaker(layout, VOCABULARY, device=torch.device("cpu"), tile=3)
    generator = torch.Generator().manual_seed(5)
    masks = [
        rising_masks(streams * maker.blocks(s), SIZE, generator).view(streams, maker.blocks(s), SIZE) for s in sequences
    ]
    return maker.make(sequences, masks)


def dense(layout: Layout, length: int, start: int | None) -> torch.Tensor:
    """[length, length] bool, row by row from the definition; the block from `start` on is open."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(length):
            same_block = i // SIZE == j // SIZE
            opened = start is not None and i >= start
            seen[i, j] = j <= i or (same_block and (opened or not layout.shift))
    return seen


def merged_weights(model: ConvertedModel) -> dict[str, torch.Tensor]:
    """Return tensors by Hugging Face's names; they pass gradients on to the factors."""
    out = {}
    for name, module in model.projections().items():
        _, layer, ours = name.split(".")
        names = delta.TARGETS[ours]
        whole = module.weight + module.b @ module.a
        rows = [whole.shape[0]]
        if ours == "qkv":
            rows = [model.config.num_heads * 8, model.config.num_kv_heads * 8, model.config.num_kv_heads * 8]
        if ours == "gate_up":
            rows = [model.config.intermediate_size] * 2
        out |= {f"model.layers.{layer}.{n}.weight": w for n, w in zip(names, whole.split(rows), strict=True)}
    return out


def reference(model: ConvertedModel, target: TargetModel, ids: torch.Tensor, start: int | None) -> torch.Tensor:
    """Logits [S, V] of one text with an open block from `start` on, by transformers."""
    embedded = torch.where((ids == MASK)[:, None], model.mask, target.embedding[ids])
    seen = dense(model.layout, len(ids), start)
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    out = torch.func.functional_call(
        target.model, merged_weights(model), kwargs={
            "inputs_embeds": embedded[None], "attention_mask": bias[None, None], "use_cache": False,
            "position_ids": torch.arange(len(ids))[None],
        },
    )  # fmt: skip
    logits: torch.Tensor = out.logits[0]
    return logits


def test_every_open_block_is_its_own_forward(model: ConvertedModel, frozen: FrozenTarget, target: TargetModel) -> None:
    sequences = answers()
    pack = pack_of(model.layout, sequences)
    with torch.no_grad():
        hidden, cache = model.read_finished(frozen.embedding[pack.ids], pack.spans)
        inputs = model.inputs(frozen.embedding, pack.block_ids, pack.masked)
        opened = model.read_open(inputs, pack.starts, cache, pack.tiles) @ target.head.T
        blocks = iter(range(len(pack.starts)))
        for s, (row, length) in zip(sequences, pack.spans, strict=True):
            finished = hidden[row : row + length] @ target.head.T
            assert_near(finished, reference(model, target, s.tokens, None), TERMS)
            for _ in range(2 * (length // SIZE - s.prompt // SIZE)):
                i = next(blocks)
                start = int(pack.starts[i])
                block = torch.where(pack.masked[i], MASK, s.tokens[start : start + SIZE])
                assert (block[: max(0, s.prompt - start)] != MASK).all()
                alone = reference(model, target, torch.cat([s.tokens[:start], block]), start)[start:]
                assert_near(opened[i], alone, TERMS)
        assert next(blocks, None) is None


def test_loss_and_gradients(model: ConvertedModel, frozen: FrozenTarget, target: TargetModel, tmp_path: Path) -> None:
    sequences = answers()
    pack = pack_of(model.layout, sequences)
    terms = []
    blocks = iter(range(len(pack.starts)))
    for s, (_, length) in zip(sequences, pack.spans, strict=True):
        finished = reference(model, target, s.tokens, None)
        for turn in range(2 * (length // SIZE - s.prompt // SIZE)):
            i = next(blocks)
            start = int(pack.starts[i])
            block = torch.where(pack.masked[i], MASK, s.tokens[start : start + SIZE])
            logits = reference(model, target, torch.cat([s.tokens[:start], block]), start)
            for column, at in enumerate(range(start, start + SIZE)):
                row = logits[at]
                wanted = at >= s.prompt and bool(pack.masked[i, column])
                if model.layout.shift:
                    row = logits[at - 1] if column else finished[at - 1]
                    wanted = wanted if column else at >= s.prompt and turn % 2 == 0
                if wanted:
                    known = s.top_ids[at - s.prompt] != MASK
                    ids, probs = s.top_ids[at - s.prompt][known], s.top_probs[at - s.prompt][known]
                    logs = row.masked_fill(torch.arange(VOCABULARY) == MASK, -torch.inf).log_softmax(0)
                    terms.append((torch.xlogy(probs, probs) - probs * logs[ids]).sum())
    factors = {**model.deltas(), "mask": model.mask}
    expected = torch.autograd.grad(torch.stack(terms).mean(), list(factors.values()))

    training = ConversionRun(tmp_path, model, frozen, Recipe(steps=1), streams=2, stops={STOP})
    row = training.learn(type("Step", (), {"packs": [pack]})())
    assert len(pack.rows) == len(terms)
    torch.testing.assert_close(float(row["kl"]), torch.stack(terms).mean().item(), atol=1e-4, rtol=1e-4)
    for (name, factor), gradient in zip(factors.items(), expected, strict=True):
        torch.testing.assert_close(factor.grad, gradient, atol=2e-4, rtol=2e-3, msg=lambda m, name=name: f"{name}: {m}")


def test_packs_hold_every_sequence_and_stop_tokens_fill_the_last_block(layout: Layout) -> None:
    sequences = answers(3)
    for s, raw in zip(sequences, (17, 19, 21), strict=True):
        assert len(s.tokens) % SIZE == 0
        assert (s.tokens[raw - 1 :] == STOP).all()
        assert (s.top_ids[raw - s.prompt :, 0] == STOP).all()
        assert (s.top_probs[raw - s.prompt :, 0] == 1).all()
    pack = pack_of(layout, sequences)
    assert pack.ids.tolist() == [t for s in sequences for t in s.tokens.tolist()]
    cut = whole_blocks(replace(answers(1)[0].first(18)), SIZE, set())
    assert len(cut.tokens) == 16
    assert len(cut.top_ids) == 16 - cut.prompt


def test_masks_rise_with_position() -> None:
    masked = rising_masks(20_000, SIZE, torch.Generator().manual_seed(0))
    assert masked.any(1).all()
    expected = torch.tensor([i / (i + 1) for i in (1, 2, 3)])  # the mean of 1 - (1 - t)^i
    torch.testing.assert_close(masked.float().mean(0)[:3], expected, atol=0.01, rtol=0)
    assert masked[:, 3].float().mean() > 0.8


@torch.inference_mode()
def generate(
    model: ConvertedModel, frozen: FrozenTarget, prompt: list[int], *, tokens: int, stops: set[int], per_step: int = 1
) -> list[int]:
    """The greedy continuation of at most `tokens` tokens, including its stop token."""
    ids, size, config = list(prompt), model.layout.block_size, model.config
    empty = torch.zeros(0, config.num_kv_heads, config.head_dim)
    while len(ids) < len(prompt) + tokens:
        start = len(ids) // size * size
        hidden, cache = model.mask[None], [(empty, empty)] * config.num_layers
        if start:
            hidden, cache = model.read_finished(frozen.embedding[ids[:start]], [(0, start)])
        block = torch.tensor([ids[start:] + [0] * (start + size - len(ids))])
        read = partial(
            model.read_open, starts=torch.tensor([start]), cache=cache,
            tiles=[Tile(0, 0, torch.zeros(1, 1, start, dtype=torch.bool))],
        )  # fmt: skip
        masked = torch.arange(size)[None] >= len(ids) - start
        for token in denoise(model, frozen, hidden[-1:], block, masked, per_step, read)[0, len(ids) - start :].tolist():
            ids.append(token)
            if token in stops:
                return ids[len(prompt) : len(prompt) + tokens]
    return ids[len(prompt) : len(prompt) + tokens]


@pytest.mark.parametrize("per_step", [1, 2])
@pytest.mark.parametrize("prompt", [1, 6, 8])
def test_generation_equals_unmasking_without_a_cache(
    model: ConvertedModel, frozen: FrozenTarget, target: TargetModel, per_step: int, prompt: int
) -> None:
    ids = torch.randint(3, MASK, (prompt,), generator=torch.Generator().manual_seed(prompt)).tolist()
    made = generate(model, frozen, ids, tokens=13, stops=set(), per_step=per_step)
    text, plain = list(ids), []
    with torch.no_grad():
        while len(text) < prompt + 13:
            start = len(text) // SIZE * SIZE
            text += [MASK] * (start + SIZE - len(text))
            while MASK in text:
                state = torch.tensor(text)
                logits = reference(model, target, state, start)
                if model.layout.shift:  # a row of the context predicts the first token
                    logits = torch.cat([logits[:1], logits[:-1]])
                logits[:, MASK] = -torch.inf
                best = logits.log_softmax(-1).max(-1)
                masked = (state == MASK).nonzero()[:, 0].tolist()
                for at in sorted(masked, key=lambda at: -best.values[at])[:per_step]:
                    text[at] = int(best.indices[at])
        plain = text[prompt : prompt + 13]
    assert made == plain
    assert len(made) == 13
    assert (
        generate(model, frozen, ids, tokens=13, stops={made[2]}, per_step=per_step) == made[: made.index(made[2]) + 1]
    )


def test_the_models_own_text_agrees(model: ConvertedModel, frozen: FrozenTarget) -> None:
    prompt = list(range(10, 18))
    made = generate(model, frozen, prompt, tokens=12, stops=set())
    s = Sequence(
        torch.tensor(prompt + made), 8, torch.empty(20, 0), torch.zeros(12, 5, dtype=torch.int64), torch.ones(12, 5)
    )
    pack = pack_of(model.layout, [s], streams=1)
    assert agreement(model, frozen, pack, 1) == (12, 12)
    changed = replace(s, tokens=torch.where(torch.arange(20) == 9, 3, s.tokens))
    right, tried = agreement(model, frozen, pack_of(model.layout, [changed], streams=1), 1)
    assert right < tried


RECIPE = f"--delta-rank 4 --mask-token {MASK} --lr 0.02 --ema 0.9 --steps 40 --validate-every 40 --validation 2"
arguments = partial(training, RECIPE, "dllm")


@pytest.mark.slow
def test_training_learns_and_survives_stops(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    assert train.run(arguments(target_folder, prompts, tmp_path / "whole")) == 0
    rows = check_learned(tmp_path / "whole", "kl")
    assert 0 <= float(rows[-1]["agreement"]) <= 1
    more = ["--data", str(tmp_path / "whole"), "--save-seconds", "0"]
    for steps in ("13", "40"):
        pieces = arguments(target_folder, prompts, tmp_path / "pieces", *more, "--steps", steps)
        assert train.run(pieces) == 0
    left, right = (tmp_path / name / "delta" / "model.safetensors" for name in ("whole", "pieces"))
    assert left.read_bytes() == right.read_bytes()
    with pytest.raises(ValueError, match="another shape"):
        train.run(arguments(target_folder, prompts, tmp_path / "pieces", *more, "--layout", "sdar"))


def test_a_target_without_a_spare_token_is_refused(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    args = arguments(target_folder, prompts, tmp_path / "out")
    args.mask_token = None
    with pytest.raises(ValueError, match="--mask-token"):
        train.run(args)


def test_merged_folder_is_the_model_with_its_delta(
    model: ConvertedModel, target: TargetModel, target_folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    delta.save(model, tmp_path / "delta")
    stored = load_file(tmp_path / "delta" / "model.safetensors")
    assert all(stored[name].dtype == torch.int8 for name in model.deltas())
    with torch.no_grad():
        for name, factor in model.deltas().items():
            kept = stored[name].float() * stored[f"{name}.scale"]
            torch.testing.assert_close(kept.T if name.endswith(".b") else kept, factor, atol=0.01, rtol=0)
            factor.copy_(kept.T if name.endswith(".b") else kept)
        model.mask.copy_(stored["mask"])
        ids = torch.randint(3, VOCABULARY, (11,), generator=torch.Generator().manual_seed(2))
        expected = reference(model, target, ids, None)
    given = argparse.Namespace(
        drafter=[tmp_path / "delta"], target=target_folder, out=tmp_path / "merged", storage="bf16"
    )
    assert export(given) == 0
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert {name: config[name] for name in delta.FIELDS} == {
        "block_size": SIZE, "mask_token_id": MASK, "shift": model.layout.shift,
        "context_mask": "causal" if model.layout.shift else "block",
    }  # fmt: skip
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    seen = dense(model.layout, len(ids), None)
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = merged(input_ids=ids[None], attention_mask=bias[None, None]).logits[0]
    others = torch.arange(VOCABULARY) != MASK  # a shared embedding changes the mask's logit
    assert_near(logits[:, others], expected[:, others], TERMS)


def test_a_delta_of_another_target_is_refused(model: ConvertedModel, target_folder: Path, tmp_path: Path) -> None:
    delta.save(model, tmp_path / "delta")
    config = json.loads((tmp_path / "delta" / "config.json").read_text())
    config["target"] = {"hidden_size": 64}
    (tmp_path / "delta" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="hidden_size is 32, the delta is for 64"):
        delta.write_merged(target_folder, tmp_path / "delta", tmp_path / "merged")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        delta.write_merged(target_folder, tmp_path / "nothing", tmp_path / "merged")
