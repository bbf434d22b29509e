"""The MLP of an MTP layer: a plain one, or a mixture of experts like the target's."""

import torch

from outrider.kernels.experts import run_experts, run_joined_experts
from outrider.kernels.fused import silu_mul
from outrider.kernels.linear import PackedWeight, pack
from outrider.kernels.weights import multiply

from ..chain.network import ChainWeights, prepared, stacked
from .checkpoint import CORRECTION, EXPERTS, JOINED, MLP
from .config import ExpertsConfig


class Mlp:
    """A plain MLP; prefix: of its tensors' names."""

    def __init__(self, weights: ChainWeights, prefix: str = MLP):
        self.gate_up = stacked(weights, [f"{prefix}{part}_proj" for part in ("gate", "up")])
        self.down = stacked(weights, [f"{prefix}down_proj"])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output [N, d] for x [N, d]."""
        return multiply(silu_mul(multiply(x, self.gate_up)), self.down)


class Experts:
    """A mixture of experts, plus one shared by all rows, which has a gate in Qwen's layers."""

    def __init__(self, weights: ChainWeights, config: ExpertsConfig):
        self.config, tensors = config, weights.tensors
        self.router = pack(tensors[f"{MLP}gate.weight"].float())
        self.bias = weights.get(CORRECTION)
        self.experts: list[tuple[PackedWeight, PackedWeight]] = []
        self.joined: tuple[torch.Tensor, torch.Tensor] | None = None
        if not tensors[f"{MLP}gate.weight"].is_cpu:
            self.joined = joined(tensors, config.count)
        elif JOINED in tensors:
            parts = zip(tensors[JOINED], tensors[f"{EXPERTS}down_proj"], strict=True)
            self.experts = [(prepared(gate_up), prepared(down)) for gate_up, down in parts]
        else:
            mlps = [Mlp(weights, f"{EXPERTS}{i}.") for i in range(config.count)]
            self.experts = [(mlp.gate_up, mlp.down) for mlp in mlps]
        self.shared = Mlp(weights, f"{MLP}shared_expert.") if config.shared_size else None
        gate = weights.get(f"{MLP}shared_expert_gate.weight")
        self.shared_gate = None if gate is None else pack(gate.float())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mixture's output [N, d] for x [N, d]."""
        wide = x.float()
        chosen = self.choose(multiply(wide, self.router))
        if self.joined is None:
            out = run_experts(x, *chosen, self.experts)
        else:
            out = run_joined_experts(x, *chosen, *self.joined)
        if self.shared is None:
            return out
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(multiply(wide, self.shared_gate)).to(x.dtype)
        return out + shared

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return shares and numbers [N, K] of the experts chosen by a router's logits [N, E]."""
        config = self.config
        scores = logits.sigmoid() if config.sigmoid else logits.softmax(-1)
        ranked = scores if self.bias is None else scores + self.bias
        if config.groups > 1:
            groups = ranked.unflatten(-1, (config.groups, -1))
            best = groups.topk(2, -1).values.sum(-1).topk(config.chosen_groups, -1).indices
            outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            ranked = groups.masked_fill(outside[..., None], -torch.inf).flatten(-2)
        chosen = ranked.topk(config.chosen, -1).indices
        shares = scores.gather(-1, chosen)
        if config.normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        return shares * config.scale, chosen


def joined(tensors: dict[str, torch.Tensor], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all experts' weights together, [E, 2 * I, H] and [E, H, I]. Tensors of single experts are removed as they
    are copied, since both would not always fit in memory."""
    if JOINED in tensors:
        return tensors[JOINED], tensors[f"{EXPERTS}down_proj"]
    like = tensors[f"{EXPERTS}0.down_proj.weight"]
    size, inner = like.shape
    gate_up, down = like.new_empty(count, 2 * inner, size), like.new_empty(count, size, inner)
    for i in range(count):
        for part, place in (("gate", gate_up[i, :inner]), ("up", gate_up[i, inner:]), ("down", down[i])):
            place.copy_(tensors.pop(f"{EXPERTS}{i}.{part}_proj.weight"))
    return gate_up, down
