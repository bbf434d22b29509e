"""Drafts with SGLang's own module for Qwen3.5's MTP layer; prints the greedy tokens of each text as JSON:
mtp_by_sglang.py TARGET FOLDER TEXTS

TARGET is any that SGLang knows, FOLDER holds the layer. Attention, order of rows and TEXTS are as in
`eagle_by_sglang.py`.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from eagle_by_sglang import Attention
from safetensors.torch import load_file
from sglang.srt.configs.qwen3_5 import Qwen3_5TextConfig
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models import qwen3_5
from sglang.srt.models.qwen3_5_mtp import Qwen3_5ForCausalLMMTP
from single_rank import publish_alone


class States(torch.nn.Module):
    """Returns the states in place of logits."""

    def forward(self, ids: torch.Tensor, hidden: torch.Tensor, head: Any, batch: Any) -> torch.Tensor:
        return hidden


def gate(x: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False) -> torch.Tensor:
    """Replaces SGLang's kernel for GPUs."""
    return x * torch.sigmoid(gate.reshape(x.shape))


def draft(model: Any, given: dict[str, Any], ids: list[int], hidden: torch.Tensor) -> list[int]:
    """Greedy tokens after `ids`; the target has not read their last token."""
    model.model.layers[0].attn.clear()
    tokens, positions, drafted = torch.tensor(ids[1:]), torch.arange(len(ids) - 1), []
    for _ in range(given["gamma"]):
        batch = SimpleNamespace(
            spec_info=SimpleNamespace(hidden_states=hidden), mm_input_embeds=None, forward_mode=ForwardMode.DECODE,
            contains_mm_inputs=lambda: False, mrope_positions=positions,
        )  # fmt: skip
        out = model(tokens, positions, batch)
        drafted.append(int((given["head"] @ out[-1]).argmax()))
        tokens, positions, hidden = torch.tensor(drafted[-1:]), positions[-1:] + 1, out[-1:]
    return drafted


def main(target: str, folder: str, texts: str) -> None:
    publish_alone(model_path=target, dtype="float32")
    qwen3_5.fused_sigmoid_mul = gate
    given = torch.load(texts)
    config = json.loads((Path(folder) / "config.json").read_text())["text_config"]
    config["partial_rotary_factor"] = config["rope_parameters"]["partial_rotary_factor"]
    torch.set_default_dtype(torch.float32)
    model = Qwen3_5ForCausalLMMTP(Qwen3_5TextConfig(**config)).float().eval()
    model.load_weights(iter(load_file(Path(folder) / "model.safetensors").items()))
    model.model.embed_tokens.weight.data[: len(given["embedding"])] = given["embedding"]
    model.model.layers[0].attn = Attention(model.config)
    model.logits_processor = States()
    with torch.inference_mode():
        print(json.dumps([draft(model, given, ids, hidden) for ids, hidden in given["texts"]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
