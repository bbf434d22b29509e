"""AdamW on float32 masters of a low-precision model, their running means, and the learning-rate schedule."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Optimiser:
    """AdamW with state and weights in float32 whatever the model's dtype.

    A bfloat16 model computes with rounded copies of the masters; a float32 model is its own master.
    means: running means of the masters, which forget with the factor `ema` a step, faster in the first steps; none
        where it is 0.
    """

    def __init__(self, model: nn.Module, *, lr: float, weight_decay: float, ema: float = 0.0) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().requires_grad_() if p.dtype != torch.float32 else p for p in self.parameters]
        matrices = [m for m in self.masters if m.ndim > 1]
        vectors = [m for m in self.masters if m.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
        self.lr, self.ema, self.steps = lr, ema, 0
        self.means = [m.detach().clone() for m in self.masters] if ema else []

    def step(self, scale: float) -> torch.Tensor:
        """Do one update at learning rate lr * scale; return the gradient norm before it is clipped to 1, a scalar."""
        for p, master in zip(self.parameters, self.masters, strict=True):
            if master is not p:
                master.grad = None if p.grad is None else p.grad.float()
        norm = nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.lr * scale
        self.adam.step()
        with torch.no_grad():
            for p, master in zip(self.parameters, self.masters, strict=True):
                if master is not p:
                    p.copy_(master)
                p.grad = None
            self.steps += 1
            if self.means:
                kept = min(self.ema, self.steps / (self.steps + 10))
                torch._foreach_lerp_(self.means, self.masters, 1 - kept)
        return norm

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model has the running means for weights, if there are any."""
        originals = [m.detach().clone() for m in self.masters] if self.means else []
        try:
            self._fill(self.means)
            yield
        finally:
            self._fill(originals)

    def adopt_means(self) -> None:
        """Take the running means, if there are any, as the model's weights for good."""
        self._fill(self.means)

    @torch.no_grad()
    def _fill(self, weights: list[torch.Tensor]) -> None:
        for p, weight in zip(self.parameters, weights, strict=bool(weights)):
            p.copy_(weight)

    def state_dict(self) -> dict:
        """Return masters, their means and AdamW's state."""
        masters = [m.detach() for m in self.masters]
        return {"masters": masters, "means": self.means, "steps": self.steps, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Restore, rounding the masters into the model."""
        with torch.no_grad():
            for p, master, saved in zip(self.parameters, self.masters, state["masters"], strict=True):
                master.copy_(saved)
                p.copy_(saved)
            if self.ema:
                for mean, saved in zip(self.means, state["means"] or state["masters"], strict=True):
                    mean.copy_(saved)
        self.steps = state["steps"]
        self.adam.load_state_dict(state["adam"])


def learning_rate(step: int, steps: int, *, warmup: int, decay_steps: int) -> float:
    """Return the share of the peak rate: linear warm-up, constant, then linear to 0 over the last `decay_steps`. The
    constant middle lets a run be lengthened: resume from before its decay with a larger `steps`."""
    rise = min(1.0, (step + 1) / max(1, warmup))
    return rise * min(1.0, max(0.0, (steps - step) / max(1, decay_steps)))
