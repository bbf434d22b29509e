"""Random LoRA adapters in PEFT's format, and the model with an adapter merged into its weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: PreTrainedModel,
    seed: int,
    *,
    rank: int = 4,
    modules: Sequence[str] = ALL,
    strength: float = 0.3,
    **config: Any,
) -> Path:
    """Write an adapter that changes weights by `strength` of their size."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in model.named_parameters():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            outputs, depth = weight.shape
            size = (strength * float(weight.detach().float().std()) / 2) ** 0.5 * rank**-0.25
            for side, shape in (("A", (rank, depth)), ("B", (outputs, rank))):
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = size * torch.randn(shape, generator=draw)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about | config))
    return folder


def merged(model_folder: Path, adapter: Path) -> PreTrainedModel:
    """The model in float32 with every adapted W replaced by W + s B A."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, weights = load_file(adapter / "adapter_model.safetensors"), dict(model.named_parameters())
    with torch.no_grad():
        for name, down in tensors.items():
            if "lora_A" in name:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                up = tensors[name.replace("lora_A", "lora_B")]
                root = 0.5 if config.get("use_rslora") else 1.0
                weights[f"{module}.weight"] += config["lora_alpha"] / len(down) ** root * up @ down
    return model


@torch.inference_mode()
def is_greedy(model: PreTrainedModel, prompt: list[int], answer: list[int], tolerance: float = 1e-3) -> bool:
    """True if each token of an answer is the model's most likely one, up to rounding."""
    logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool((chosen >= logits.max(1).values - tolerance).all())
