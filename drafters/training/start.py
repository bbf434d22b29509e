"""Starting weights: draft layers copied from the target's last ones, the sequential head fitted to token pairs."""

from collections.abc import Iterable
from typing import Any

import torch

from ..block.config import BlockConfig
from ..block.layers import DraftLayer
from ..block.model import BlockModel, DraftModel
from ..diffusion.model import DiffusionModel
from ..eagle.checkpoint import ATTENTION, LAYER
from ..eagle.config import EagleConfig
from ..eagle.model import EagleModel, key
from .store import FeatureStore
from .target import TargetModel, outputs_of

QUIET = 0.3
"""Factor of the backbone's logits next to a fitted sequential head, before the first step."""


def check_shape(config: BlockConfig | EagleConfig, layer: Any) -> None:
    """Raise ValueError where a layer of the target is shaped differently from the drafter's."""
    attention, mlp = layer.self_attn, layer.mlp
    shapes = {
        "hidden size": (mlp.down_proj.out_features, config.hidden_size),
        "intermediate size": (mlp.down_proj.in_features, config.intermediate_size),
        "query width": (attention.q_proj.out_features, config.num_heads * config.head_dim),
        "key width": (attention.k_proj.out_features, config.num_kv_heads * config.head_dim),
    }
    differ = [f"{name} {there} against {here}" for name, (there, here) in shapes.items() if there != here]
    if differ:
        raise ValueError(f"draft layers cannot start from the target's: {', '.join(differ)}; use --start fresh")


def copy_layer(layer: DraftLayer, source: Any, *, qk_norm: bool = False) -> None:
    """Copy the weights of a target's layer; qk_norm: including the norms of queries and keys."""
    layer.input_layernorm.weight.copy_(source.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    layer.qkv.weight.copy_(torch.cat([getattr(source.self_attn, f"{p}_proj").weight for p in "qkv"]))
    layer.o_proj.weight.copy_(source.self_attn.o_proj.weight)
    layer.gate_up.weight.copy_(torch.cat([source.mlp.gate_proj.weight, source.mlp.up_proj.weight]))
    layer.down_proj.weight.copy_(source.mlp.down_proj.weight)
    if qk_norm:
        layer.q_norm.weight.copy_(source.self_attn.q_norm.weight)
        layer.k_norm.weight.copy_(source.self_attn.k_norm.weight)


def copy_layers(model: DraftModel, target: TargetModel, numbers: Iterable[int]) -> None:
    """Copy these layers of the target, in order, and its last norm. Raises ValueError where shapes do not match."""
    for layer, number in zip(model.draft_layers, numbers, strict=True):
        source = target.model.model.layers[number]
        check_shape(model.config, source)
        copy_layer(layer, source, qk_norm=model.config.qk_norm)
    model.norm.weight.copy_(target.model.model.norm.weight)


@torch.no_grad()
def start_eagle(model: EagleModel, target: TargetModel) -> None:
    """Copy the target's last layer, as the part that reads features, and its last norm. Weights that read embeddings
    stay random. `fc` becomes the identity on the last feature."""
    source = target.model.model.layers[-1]
    check_shape(model.config, source)

    def fill(name: str, weight: torch.Tensor) -> None:
        model.weights[key(name)][..., -weight.shape[-1] :] = weight

    for part in "qkvo":
        fill(f"{ATTENTION}{part}_proj.weight", getattr(source.self_attn, f"{part}_proj").weight)
    for part in ("gate", "up", "down"):
        fill(f"{LAYER}mlp.{part}_proj.weight", getattr(source.mlp, f"{part}_proj").weight)
    fill(f"{LAYER}hidden_norm.weight", source.input_layernorm.weight)
    fill(f"{LAYER}post_attention_layernorm.weight", source.post_attention_layernorm.weight)
    fill("norm.weight", target.model.model.norm.weight)
    model.weights[key("fc.weight")].mul_(0.1)
    fill("fc.weight", torch.eye(model.config.hidden_size))


@torch.no_grad()
def start_diffusion(model: DiffusionModel, target: TargetModel, layers: Iterable[int] | None) -> None:
    """Copy these layers of the target, in order, and its last norm; None: neither. A mask starts as the mean of all
    embeddings, the separator as zero."""
    if layers is not None:
        copy_layers(model, target, layers)
    model.mask.copy_(target.embedding.float().mean(0))
    model.separator.zero_()


@torch.no_grad()
def start_from_target(model: BlockModel, target: TargetModel, tokens: torch.Tensor) -> None:
    """Copy the target's last layers into the draft layers, in order; heads and embeddings are shared anyway.

    `fc` becomes the identity on the last feature and `hidden_norm` the input norm of the first copied layer. The draft
    layers norm queries and keys, which a Llama-shaped target does not: their norms get the mean size of the target's
    own queries and keys, measured on `tokens` [S].
    """
    config, size = model.config, model.config.hidden_size
    sources = list(target.model.model.layers)[-config.num_layers :]
    check_shape(config, sources[0])
    products = {(i, p): getattr(source.self_attn, f"{p}_proj") for i, source in enumerate(sources) for p in "qk"}
    with outputs_of(products) as outputs:
        target.model(input_ids=tokens[None].to(target.device), use_cache=False, logits_to_keep=1)
    heads = {at: x.float().unflatten(-1, (-1, config.head_dim)) for at, x in outputs.items()}
    sizes = {at: float(x.square().mean(-1).sqrt().mean()) for at, x in heads.items()}
    for i, (layer, source) in enumerate(zip(model.draft_layers, sources, strict=True)):
        copy_layer(layer, source)
        layer.q_norm.weight.fill_(sizes[i, "q"])
        layer.k_norm.weight.fill_(sizes[i, "k"])
    model.norm.weight.copy_(target.model.model.norm.weight)
    model.hidden_norm.weight.copy_(sources[0].input_layernorm.weight)
    model.fc.weight.normal_(std=0.002)
    model.fc.weight[:, -size:] += torch.eye(size, device=model.fc.weight.device, dtype=model.fc.weight.dtype)


def start_markov(
    model: BlockModel,
    store: FeatureStore,
    numbers: list[int],
    answers: Iterable[tuple[int, ...]] = (),
    *,
    iterations: int = 12,
    device: torch.device | str = "cpu",
) -> float:
    """Fit W1 W2 alone to which token follows which, before the first step; return the cross entropy reached.

    It counts the target's likely tokens in the stored sequences `numbers`, and the tokens of further `answers`. By
    previous token this is a table of at most V rows, and fitting a rank-r softmax to it takes seconds; learnt along
    with the backbone the same table takes a hundred thousand anchors. More iterations would overfit the rare rows. The
    backbone's logits start `QUIET` times as large, so that they do not override the table.
    Without a sequential head it returns 0.
    device: where it is fitted.
    """
    head, vocab = model.markov_head, model.vocab.cpu()
    if head is None:
        return 0.0
    columns = torch.full((model.config.vocab_size,), -1, dtype=torch.int64)
    columns[vocab] = torch.arange(len(vocab))
    more = [torch.tensor(ids) for ids in answers]
    seen = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    for number in numbers:
        seen[_before(store, number)] = True
    for ids in more:
        seen[ids[:-1]] = True
    tokens, rows = seen.nonzero()[:, 0], seen.cumsum(0) - 1
    table = torch.zeros(len(tokens), len(vocab))

    def count(before: torch.Tensor, following: torch.Tensor, weights: torch.Tensor) -> None:
        places = rows[before][:, None] * len(vocab) + following.clamp_min(0)
        table.view(-1).index_add_(0, places.flatten(), (weights * (following >= 0)).flatten())

    for number in numbers:
        e = store.entries[number]
        ids, probs = (store.rows_of(name, e.top, e.top + e.length - e.prompt) for name in ("top_ids", "top_probs"))
        count(_before(store, number), columns[ids.long()], probs.float())
    for ids in more:
        count(ids[:-1], columns[ids[1:, None]], torch.ones(len(ids) - 1, 1))
    table = (table / table.sum()).to(device)
    w1, w2 = (torch.randn(n, head.rank).mul_(0.1).to(device).requires_grad_() for n in table.shape)
    adam = torch.optim.Adam([w1, w2], lr=0.05)
    for _ in range(iterations):
        loss = -(table * torch.log_softmax(w1 @ w2.T, -1)).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        head.w1.weight[tokens] = w1.to(head.w1.weight)
        head.w2.weight.copy_(w2)
        model.norm.weight.mul_(QUIET)
    return float(loss.detach())


def _before(store: FeatureStore, number: int) -> torch.Tensor:
    """Return the tokens before each of a stored answer."""
    e = store.entries[number]
    return store.rows_of("tokens", e.start + e.prompt - 1, e.start + e.length - 1)[:, 0].long()
