"""DSpark's sequential and confidence heads (section 3.1, equations 4 to 6; section 3.2.1, equation 7).

Every sequential head turns the previous token into a latent of r numbers, and the latent into a bias over the draft
vocabulary through W2. Heads differ only in the latent: sampling a block calls `step`, training calls `latents` (teacher
forcing).
"""

import torch
from torch import nn

from .config import BlockConfig


class MarkovHead(nn.Module):
    """The bias B(x_{k-1}, .) = W1[x_{k-1}] W2."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.w2 = nn.Linear(config.markov_rank, config.logit_size, bias=False)
        nn.init.normal_(self.w1.weight, std=0.02)
        nn.init.normal_(self.w2.weight, std=0.02)

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the state before the first position, [R, r], for hidden states [R, gamma, d]."""
        return hidden.new_zeros(hidden.shape[0], self.rank)

    def step(
        self, state: torch.Tensor, previous: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (next state, latent [R, r]) of one position from W1[x_{k-1}] [R, r] and h_k [R, d]."""
        return state, previous

    def latents(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return latents [N, gamma, r] for known previous tokens [N, gamma] and hidden states [N, gamma, d]."""
        previous = self.w1(tokens)
        state, out = self.start(hidden), []
        for k in range(tokens.shape[1]):
            state, latent = self.step(state, previous[:, k], hidden[:, k])
            out.append(latent)
        return torch.stack(out, 1)


class GatedHead(MarkovHead):
    """The Markov head with its latent gated by sigmoid(W [h_k ; W1[x_{k-1}]])."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + self.rank, self.rank)

    def step(
        self, state: torch.Tensor, previous: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return state, previous * torch.sigmoid(self.gate_proj(torch.cat([hidden, previous], -1)))


class RnnHead(MarkovHead):
    """A gated recurrent state over the block's prefix (equation 6)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * self.rank + config.hidden_size, 3 * self.rank)

    def step(
        self, state: torch.Tensor, previous: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate, candidate, output = self.joint_proj(torch.cat([state, previous, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(output)


SEQUENTIAL_HEADS = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RnnHead}


SAMPLED = (0.52, 0.31, -0.45)
GREEDY = (0.50, 0.65, -0.35)
"""Weights of the head's logit, of the logit of max_v q_k(v), and of 1, in a confidence's logit. The head alone does not
see how sharp q_k is. Logistic regression on drafts of the embedded model's DSpark: SAMPLED at temperatures 1 and 0.7,
GREEDY at 0."""


class ConfidenceHead(nn.Module):
    """The logit of c_k, w [h_k ; W1[x_{k-1}]] (equation 7)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Return logits of c_k, [..., ], for hidden [..., d] and W1[x_{k-1}] [..., r]."""
        inputs = torch.cat([hidden, previous.to(hidden.dtype)], -1) if self.with_markov else hidden
        return self.proj(inputs).squeeze(-1)

    def confidence(
        self, hidden: torch.Tensor, previous: torch.Tensor, largest: torch.Tensor, temperatures: torch.Tensor
    ) -> torch.Tensor:
        """Return confidences [R, gamma] float32 at `temperatures` [R], from the head's logit and the sharpness of q.

        Neither depends on the token drawn.
        hidden: [R, gamma, d]. previous: [R, gamma, r].
        largest: [R, gamma] max_v q_k(v), of temperature 1 where a request is greedy.
        """
        greedy = (temperatures <= 0)[:, None]
        of_head, of_draft, constant = (torch.where(greedy, *pair) for pair in zip(GREEDY, SAMPLED, strict=True))
        logits = of_head * self(hidden, previous).float() + of_draft * torch.logit(largest.float(), eps=1e-6)
        return torch.sigmoid(logits + constant)
