"""A small random Llama with a real tokenizer, and drafters for it that are right about half the time, untrained.

Its next token depends mostly on the last one, so a drafter that knows only embedding and head drafts well. When
sampling, the likeliest token has a probability of about 0.4; greedy answers do not fall into short loops, and some end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from outrider.drafters.block.checkpoint import save_compact, target_identity
from outrider.drafters.block.choosing import CodebookChoosing, Convolution, LatticeChoosing
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.model import BlockModel, DraftModel
from outrider.drafters.diffusion.model import DiffusionModel
from outrider.server.model import bundled_model, target

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD = 768, 64, 2, 4, 2, 32
GAMMA = 7
SPECIAL = 17
"""Tokens before this one are special: <|endoftext|>, <|im_start|>, <|im_end|>, …"""
END = 2
DRAFTED = 512
"""Tokens that the drafters know, the likeliest ones; the rest must come from the residual."""


class Exact:
    """A target with exact distributions by Transformers. folder: of the model."""

    folder: Path

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, texts: list[list[int]]) -> torch.Tensor:
        """[N, V] float64 logits after each of N texts of one length."""
        parts = [self.model(torch.tensor(texts[i : i + 64])).logits[:, -1] for i in range(0, len(texts), 64)]
        return torch.cat(parts).double()


@dataclass(frozen=True)
class SmallTarget(Exact):
    """folder: of the model. dspark, diffusion, dflash2, lilicorr, eagle3: of its drafters."""

    folder: Path
    dspark: Path
    diffusion: Path
    dflash2: Path
    lilicorr: Path
    eagle3: Path

    @classmethod
    def write(cls, folder: Path) -> SmallTarget:
        """Write everything below `folder`."""
        made = cls(*(folder / name for name in ("target", "dspark", "diffusion", "dflash2", "lilicorr", "eagle3")))
        model = _target()
        model.save_pretrained(made.folder)
        write_tokenizer(made.folder)
        for make, path in (
            (_dspark, made.dspark), (_diffusion, made.diffusion), (_dflash2, made.dflash2), (_lilicorr, made.lilicorr)
        ):  # fmt: skip
            save_compact(make(model), path)
        _eagle3(model, made.eagle3)
        return made

    @property
    def drafters(self) -> dict[str, Path]:
        """Folders of its drafters, by the registry's names."""
        return {
            "dspark": self.dspark, "dflash2": self.dflash2, "eagle3": self.eagle3, "deer": self.diffusion,
            "specdiff": self.diffusion,
        }  # fmt: skip

    def flags(self, drafter: str = "dspark", path: Path | None = None) -> tuple[str, ...]:
        """Server flags for a drafter, under the embedded model's name; path: another drafter of this kind."""
        model = ("--model", str(self.folder), "--served-model-name", bundled_model.NAME, "--drafter", drafter)
        folder = path or self.drafters.get(drafter)
        return (*model, "--drafter-path", str(folder)) if folder else model


def write_tokenizer(folder: Path) -> None:
    """The embedded model's tokenizer and chat template, cut to the first VOCAB tokens."""
    for name, content in tokenizer_files().items():
        (folder / name).write_text(content)


@cache
def tokenizer_files() -> dict[str, str]:
    """The files of `write_tokenizer`, which take half a second to make."""
    theirs = Path(target.plain_folder(None))
    content = json.loads((theirs / "tokenizer.json").read_text())
    model = content["model"]
    model["vocab"] = {word: number for word, number in model["vocab"].items() if number < VOCAB}
    model["merges"] = [(a, b) for a, b in model["merges"] if {a, b, a + b} <= model["vocab"].keys()]
    others = {name: (theirs / name).read_text() for name in ("tokenizer_config.json", "chat_template.jinja")}
    return {"tokenizer.json": json.dumps(content)} | others


def _target() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD, max_position_embeddings=1024,
        rope_theta=1e4, tie_word_embeddings=False, bos_token_id=1, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    return lively(LlamaForCausalLM(config).float())


def lively(model: Any) -> Any:
    """Give the model random weights with which the next token depends mostly on the last one.

    The first number of every embedding is the same, so the head's first column is a bias. Only the drafters' masks have
    the second number.
    """
    draw = torch.Generator().manual_seed(5)
    scales = {"q_proj": 2.5, "k_proj": 2.5, "o_proj": 0.3, "down_proj": 0.2, "experts": 0.3}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            part = name.split(".")[-2]
            if weight.ndim >= 2:
                scale = scales.get(part, 1.0) * weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=draw) * scale)
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding *= WIDTH**0.5
        embedding[:, 0], embedding[:, 1] = 2.0, 0.0
        head *= 3.0
        head[:, 0], head[:, 1] = 0.75 * torch.randn(VOCAB, generator=draw), 0.0
        head[:SPECIAL, 0] = -1.5
        head[END, 0] = 0.75
    return model.eval()


def _config(model: LlamaForCausalLM, **kind: Any) -> BlockConfig:
    return BlockConfig(
        gamma=GAMMA, vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=WIDTH, num_layers=1, num_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=HEAD, num_target_layers=LAYERS, rope_theta=1e4, max_positions=1024,
        confidence_head=True, draft_vocab_size=DRAFTED,
        target=target_identity(model.config, model.get_input_embeddings().weight), **kind,
    )  # fmt: skip


def _dspark(model: LlamaForCausalLM) -> BlockModel:
    """Its Markov head is the target's embedding and head; its layer's output is noise."""
    config = _config(model, kind="dspark", target_layers=(0,), mask_token_id=4, markov_rank=WIDTH)
    drafter = BlockModel(config, _known(model))
    _randomise(drafter)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        drafter.norm.weight.fill_(0.1)
        drafter.markov_head.w1.weight.copy_(embedding * embedding.square().mean(1, keepdim=True).rsqrt())
        drafter.markov_head.w2.weight.copy_(model.lm_head.weight[drafter.vocab])
    return drafter


def _diffusion(model: LlamaForCausalLM) -> DiffusionModel:
    """A diffusion drafter for the target.

    After a known token it predicts as the target without layers; after a mask, the frequency of the target's tokens.
    """
    config = _config(
        model, kind="diffusion", target_layers=(), mask_token_id=0, confidence_with_markov=False, qk_norm=False
    )
    drafter = DiffusionModel(config, _known(model))
    _randomise(drafter)
    with torch.no_grad():
        drafter.norm.weight.fill_(1.0)
        for layer in drafter.draft_layers:
            layer.o_proj.weight *= 0.2
            layer.down_proj.weight *= 0.2
        drafter.separator.zero_()
        drafter.mask.zero_()
        drafter.mask[:2] = torch.tensor([1.0, WIDTH**0.5])
    return drafter


def _dflash2(model: LlamaForCausalLM) -> BlockModel:
    """Candidates are the most frequent tokens; token codes are the target's embedding and head. Of a hidden state only
    the first, nearly constant number is read."""
    plain = _config(model, kind="dflash", target_layers=(0,), mask_token_id=4)
    config = replace(
        plain, kind="dflash2", confidence_head=False, draft_vocab_size=None,
        choosing=CodebookChoosing(candidates=128, rank=WIDTH), convolution=Convolution(taps=2, group=16),
    )  # fmt: skip
    drafter = BlockModel(config)
    _randomise(drafter)
    embedding, selector = model.get_input_embeddings().weight, drafter.candidate_selector
    assert selector is not None
    with torch.no_grad():
        for layer in drafter.draft_layers:
            layer.o_proj.weight *= 0.1
            layer.down_proj.weight *= 0.1
        drafter.norm.weight.zero_()
        drafter.norm.weight[0] = 0.2
        selector.predecessor_codebook.copy_(embedding * embedding.square().mean(1, keepdim=True).rsqrt())
        selector.successor_codebook.copy_(model.lm_head.weight)
        selector.hidden_projection.weight.zero_()
        selector.hidden_projection.weight[:, 0] = 0.7  # surer, as its third draft after `PROMPT` is hardly ever right
    return drafter


def _lilicorr(model: LlamaForCausalLM) -> BlockModel:
    """A LiLiCorr drafter for the target.

    The convolution gives each row the embedding before it. After the anchor, candidates are the target's likeliest
    tokens, scored by rank; after a mask, the frequent tokens. A pair's score is the product of the earlier one's
    embedding and the later one's row of the head, which the layer's MLP knows for every token.
    """
    plain = _config(model, kind="dflash", target_layers=(0,), mask_token_id=4)
    choosing = LatticeChoosing(
        candidates=64, width=5 * WIDTH, layers=1, heads=2, mlp_ratio=3.2, factors=WIDTH + 1, eps=1e-6, scale=24.0
    )
    config = replace(
        plain, kind="dflash2", confidence_head=False, draft_vocab_size=None, choosing=choosing,
        convolution=Convolution(taps=2, group=16),
    )  # fmt: skip
    drafter = BlockModel(config)
    _randomise(drafter)
    embedding, lattice, same, size = model.get_input_embeddings().weight, drafter.lilicorr, torch.eye(WIDTH), WIDTH
    assert lattice is not None
    (layer,), (inner,) = drafter.draft_layers, lattice.layers
    silent = [lattice.token_proj, lattice.pass_hidden_proj, lattice.feature_mlp.down_proj, lattice.factor_input_proj]
    silent += [lattice.out_head, lattice.in_head, lattice.anchor_out_head, inner.mlp.down_proj]
    with torch.no_grad():
        for linear in silent:
            linear.weight.zero_()
            linear.bias.zero_()
        layer.o_proj.weight *= 0.1
        inner.attn.out_proj.weight *= 0.05
        inner.attn.out_proj.bias.zero_()
        for convolution in (layer.attention_conv, layer.mlp_conv):
            convolution.kernel_projection.weight *= 0.02
            convolution.base_kernel.copy_(torch.tensor([1.0, 0.0])[:, None].expand(2, 2, size))
        layer.mlp_conv.base_kernel[0] = torch.tensor([0.0, 1.0])[:, None]
        mask = F.pad(embedding[4, 1:], (1, 0))
        layer.gate_up.weight.zero_()
        layer.gate_up.weight[:size, 0] = 1.0
        layer.gate_up.weight[size:] = same - torch.outer(mask, mask) / mask.square().sum()
        layer.down_proj.weight.copy_(16 * same)

        lattice.token_proj.weight[:size] = same
        lattice.slot_embedding.zero_()
        lattice.rank_embedding.zero_()
        lattice.rank_embedding[..., 2 * size] = 0.0012 * (2.5 - torch.arange(64) * 0.5).clamp_min(-2.5)
        inner.attn.out_proj.weight[2 * size] = 0.0
        inner.mlp.up_proj.weight[:, size:] = 0.0
        known = F.silu(inner.mlp.up_proj(F.rms_norm(F.pad(embedding, (0, 4 * size)), (5 * size,))))
        inner.mlp.down_proj.weight[size : 2 * size] = torch.linalg.lstsq(known, model.lm_head.weight).solution.T
        both = torch.cat([same, -same])  # silu(z) - silu(-z) is z
        lattice.factor_input_proj.weight[: 2 * size, :size] = both
        lattice.factor_input_proj.weight[2 * size : 4 * size, size : 2 * size] = both
        lattice.factor_input_proj.weight[4 * size : 4 * size + 2, 2 * size] = torch.tensor([1.0, -1.0])
        lattice.out_head.weight[:size, : 2 * size] = both.T
        lattice.in_head.weight[:size, 2 * size : 4 * size] = both.T
        lattice.in_head.weight[size, 4 * size : 4 * size + 2] = torch.tensor([100.0, -100.0])
        lattice.anchor_out_head.bias[size] = 1.0
    return drafter


def _eagle3(model: LlamaForCausalLM, folder: Path) -> None:
    """A head of twice the target's width, with its own numbers in the second half.

    The first half holds the last token's embedding alone: queries and keys share one direction that turns fast with
    distance, so a row attends to itself.
    """
    draw, width = torch.Generator().manual_seed(6), 2 * WIDTH
    embedding, head, known = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach(), _known(model)
    turning, looking = torch.zeros(width, 2 * width), torch.zeros(4, 2, 16)
    looking[:, :, :4] = 2.1
    turning[:, 0] = looking.flatten()
    values, out, fused = torch.zeros(width, 2 * width), torch.zeros(width, width), torch.zeros(width, WIDTH)
    values[:WIDTH, :WIDTH] = values[WIDTH:, width : width + WIDTH] = torch.eye(WIDTH)
    out[:WIDTH] = torch.cat([torch.eye(WIDTH), -1.2 * torch.eye(WIDTH)], 1)
    fused[WIDTH:] = torch.randn(WIDTH, WIDTH, generator=draw) * WIDTH**-0.5
    noise = torch.randn(4, width, width, generator=draw) * width**-0.5
    tensors = {
        "fc.weight": fused, "d2t": known - torch.arange(DRAFTED), "embed_tokens.weight": F.pad(embedding, (0, WIDTH)),
        "lm_head.weight": torch.cat([head[known], 0.1 * noise[3][:1, :WIDTH].expand(DRAFTED, -1)], 1),
        "midlayer.self_attn.q_proj.weight": turning, "midlayer.self_attn.k_proj.weight": turning.clone(),
        "midlayer.self_attn.v_proj.weight": values, "midlayer.self_attn.o_proj.weight": out,
        "midlayer.mlp.gate_proj.weight": noise[0].clone(), "midlayer.mlp.up_proj.weight": noise[1].clone(),
        "midlayer.mlp.down_proj.weight": 0.2 * noise[2],
    }  # fmt: skip
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": torch.ones(width) for name in norms}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": width, "head_dim": HEAD,
        "target_hidden_size": WIDTH, "intermediate_size": width, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": VOCAB, "draft_vocab_size": DRAFTED, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def _known(model: LlamaForCausalLM) -> torch.Tensor:
    return model.lm_head.weight[:, 0].topk(DRAFTED).indices.sort().values


def _randomise(drafter: DraftModel) -> None:
    draw = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            scale = 1.0 if weight.ndim == 1 else weight.shape[1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=draw) * scale)
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
            if "confidence" in name:
                weight *= 0.5
