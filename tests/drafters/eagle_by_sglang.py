"""Drafts with SGLang's own EAGLE-3 module; prints the greedy tokens of each text for each folder as JSON:
eagle_by_sglang.py TARGET TEXTS FOLDER…

TEXTS is saved by torch: embedding and head [V, d] of the target, texts [(ids, hidden [n, m*d])], gamma. Rows arrive as
from SGLang's worker: the prompt's with the target's hidden states, then one by one with the module's own. Only the
attention backend is replaced.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from single_rank import publish_alone
from transformers import LlamaConfig


class Attention(torch.nn.Module):
    """Causal attention over all rows since `clear`."""

    def __init__(self, config: Any):
        super().__init__()
        self.width, self.scaling = config.head_dim, config.head_dim**-0.5
        self.clear()

    def clear(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any, **_: Any) -> torch.Tensor:
        self.keys.append(k.unflatten(-1, (-1, self.width)))
        self.values.append(v.unflatten(-1, (-1, self.width)))
        keys, values = torch.cat(self.keys).transpose(0, 1), torch.cat(self.values).transpose(0, 1)
        queries = q.unflatten(-1, (-1, self.width)).transpose(0, 1)
        seen = torch.ones(len(q), keys.shape[1]).tril(keys.shape[1] - len(q)).bool()
        output = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=self.scaling, enable_gqa=True
        )
        return output.transpose(0, 1).flatten(1)


def draft(model: Any, given: dict[str, Any], ids: list[int], hidden: torch.Tensor) -> list[int]:
    """Greedy tokens after `ids`; the target has not read their last token."""
    model.model.layers[0].self_attn.attn.clear()
    tokens, positions, drafted = torch.tensor(ids[1:]), torch.arange(len(ids) - 1), []
    for _ in range(given["gamma"]):
        batch = SimpleNamespace(spec_info=SimpleNamespace(hidden_states=hidden))
        out, (state,) = model.model(tokens, positions, batch, given["embedding"][tokens])
        head = given["head"] if model.load_lm_head_from_target else model.lm_head.weight
        best = int((head @ out[-1]).argmax())
        token = best if model.hot_token_id is None else int(model.hot_token_id[best])
        drafted.append(token)
        tokens, positions, hidden = torch.tensor([token]), positions[-1:] + 1, state[-1:]
    return drafted


def main(target: str, texts: str, *folders: str) -> None:
    publish_alone(model_path=target, dtype="float32")
    given, drafts = torch.load(texts), []
    for folder in folders:
        config = LlamaConfig(**json.loads((Path(folder) / "config.json").read_text()))
        model = LlamaForCausalLMEagle3(config).float().eval()
        model.load_weights(iter(load_file(Path(folder) / "model.safetensors").items()))
        model.model.layers[0].self_attn.attn = Attention(config)
        with torch.inference_mode():
            drafts.append([draft(model, given, ids, hidden) for ids, hidden in given["texts"]])
    print(json.dumps(drafts))


if __name__ == "__main__":
    main(*sys.argv[1:])
