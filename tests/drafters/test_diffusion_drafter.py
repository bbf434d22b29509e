"""DiffusionDrafter: encoding in pieces equals encoding at once, and the drafter contract holds."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from scenes import GAMMA, LENGTHS, SLOTS, Scene, make_denoiser, pages, text
from tiny_drafters import DIFFUSIONS, TINY, batch, make_diffusion, make_model, make_target

from outrider.drafters.block.checkpoint import load, save_compact
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.config_file import CheckpointError
from outrider.drafters.diffusion.denoise import make_schedule
from outrider.drafters.diffusion.drafter import DiffusionDrafter
from outrider.drafters.diffusion.model import DiffusionModel

READER = Scene(make_denoiser, width=0)


@pytest.fixture(params=sorted(DIFFUSIONS))
def shape(request: pytest.FixtureRequest) -> BlockConfig:
    return DIFFUSIONS[request.param]


def from_scratch(
    model: DiffusionModel, embedding: torch.Tensor, ids: torch.Tensor, block: torch.Tensor, revealed: torch.Tensor
) -> torch.Tensor:
    """States [gamma, d] of a block after tokens `ids`, by the plain layers at once."""
    length = len(ids)
    x = torch.cat([embedding[ids], model.block_inputs(embedding[block][None], revealed[None])[0]])
    positions = torch.arange(length + GAMMA)
    seen = torch.ones(length + GAMMA, length + GAMMA).tril().bool()
    seen[length:, length:] = True

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = [x.transpose(0, 1) for x in (q, k, v)]
        return F.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True).transpose(0, 1)

    return model(x, positions, attend)[length:]


@pytest.mark.usefixtures("compiled", "place")
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_drafts_equal_encoding_the_whole_text_at_once(shape: BlockConfig, steps: int) -> None:
    model = make_diffusion(shape)
    embedding, head = torch.randn(2, shape.vocab_size, shape.hidden_size)
    made = DiffusionDrafter(model, embedding=embedding, head=head, denoising_steps=steps)
    made.allocate(SLOTS)
    table = pages()
    for row, length in enumerate(LENGTHS):
        READER.observe(made, table, row, 0, length)
    draft = made.propose(batch(table, [0, 1, 2], list(LENGTHS)))
    counts = made.schedule
    for row, length in enumerate(LENGTHS):
        block, done = torch.zeros(GAMMA + 1, dtype=torch.int64), 0
        block[0] = 3 + row
        for count in counts:
            known = torch.arange(GAMMA - 1) < done
            logits = from_scratch(model, embedding, text(row)[:length], block[:-1], known) @ head[model.vocab].T
            block[1 + done : 1 + done + count] = model.vocab[logits.argmax(-1)][done : done + count]
            done += count
        assert torch.equal(draft.tokens[row], block[1:])


def test_mismatches_are_refused(tmp_path: Path, shape: BlockConfig) -> None:
    folder = tmp_path / "compact"
    save_compact(make_diffusion(shape), folder)
    embedding = torch.randn(shape.vocab_size, shape.hidden_size)
    target = make_target(_llama(shape), embedding)
    assert DiffusionDrafter.load(target, folder, gamma=3, denoising_steps=3).gamma == 3
    with pytest.raises(CheckpointError, match=r"1\.\.4.*got 5"):
        DiffusionDrafter.load(target, folder, gamma=5)
    with pytest.raises(ValueError, match=r"1\.\.4.*got 5"):
        DiffusionDrafter.load(target, folder, denoising_steps=5)
    with pytest.raises(CheckpointError, match="num_hidden_layers is 8"):
        DiffusionDrafter.load(make_target(_llama(shape, layers=8), embedding), folder)
    with pytest.raises(CheckpointError, match="holds a diffusion drafter, not dspark or dflash"):
        load(folder)
    save_compact(make_model(TINY), tmp_path / "dspark")
    with pytest.raises(CheckpointError, match="holds a dspark drafter, not diffusion"):
        DiffusionDrafter.load(target, tmp_path / "dspark")


def test_schedules_reveal_every_token_once() -> None:
    assert [make_schedule(7, steps) for steps in (1, 2, 7)] == [(7,), (1, 6), (1,) * 7]
    with pytest.raises(ValueError, match=r"1\.\.7.*got 8"):
        make_schedule(7, 8)


def _llama(config: BlockConfig, layers: int = 6) -> SimpleNamespace:
    return SimpleNamespace(
        model_type="llama", hidden_size=config.hidden_size, num_hidden_layers=layers, vocab_size=config.vocab_size
    )
