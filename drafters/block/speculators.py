"""DSpark and DFlash folders in the format of vLLM's `speculators`, translated to that of DeepSpec and DFlash.

`config.json` has the shape of the layers in a section and the drafter's fields outside it. Two fields count
differently. `block_size` counts all rows, of which the anchor's predicts only with `sample_from_anchor`. A layer id
names the layer's input, the output of the layer before. Fields that some versions leave out are inferred from the rest,
or the folder is refused. Tensors have DeepSpec's names; embedding and head are copies of the target's, and `d2t` gives
the drafted tokens (`checkpoint.py: drafted_tokens`).
"""

from typing import Any

from ..config_file import CheckpointError

TYPE, SHAPE, ANCHOR = "speculators_model_type", "transformer_layer_config", "sample_from_anchor"
ARCHITECTURES = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}
"""Types that are read, and the architectures of the same drafters elsewhere."""
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
"""Fields of the layers that may also appear outside the section; there they take precedence."""
KNOWN = {
    TYPE, SHAPE, ANCHOR, *HEADS, *WINDOWS, "speculators_version", "speculators_config", "draft_vocab_size",
    "block_size", "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id", "sliding_window_non_causal",
    "max_anchors", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type",
    "tie_word_embeddings",
}  # fmt: skip
"""Fields with a known meaning; some have no effect on drafting."""


def plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` that DeepSpec or DFlash would write; raises CheckpointError naming unreadable fields."""
    kind, shape = config[TYPE], config.get(SHAPE)
    if kind not in ARCHITECTURES:
        known = ", ".join((*ARCHITECTURES, "eagle3"))
        raise CheckpointError(f"drafter's {TYPE} {kind!r} is unknown; expected one of {known}")
    if unknown := sorted(config.keys() - KNOWN):
        raise CheckpointError(f"drafter config.json has fields this loader does not know: {', '.join(unknown)}")
    needed = (SHAPE, "block_size", "aux_hidden_state_layer_ids", "mask_token_id")
    if lacks := [key for key in needed if config.get(key) is None]:
        raise CheckpointError(f"drafter config.json has no {', '.join(map(repr, lacks))}")
    assert shape is not None
    shape = shape | {key: config[key] for key in WINDOWS if config.get(key) is not None}
    _check_layers(config, shape)
    rows, from_anchor = int(config["block_size"]), anchor_predicts(config)
    if kind == "dflash" and from_anchor:
        raise CheckpointError(f"DFlash drafter uses {ANCHOR}, which this loader does not support")
    drafted = config.get("draft_vocab_size")
    return {
        **shape,
        **{key: config[key] for key in HEADS if key in config},
        "architectures": [ARCHITECTURES[kind]],
        "block_size": rows if kind == "dflash" or from_anchor else rows - 1,
        **({ANCHOR: from_anchor} if kind == "dspark" else {}),
        "target_layer_ids": [int(i) - 1 for i in config["aux_hidden_state_layer_ids"]],
        "mask_token_id": config["mask_token_id"],
        "outrider": {"draft_vocab_size": None if drafted == shape.get("vocab_size") else drafted},
    }


def anchor_predicts(config: dict[str, Any]) -> bool:
    """Return True if the first row of a block, the anchor's, predicts. Versions without that field state the tokens per
    block instead; raises CheckpointError where they do not."""
    if (stated := config.get(ANCHOR)) is not None:
        return bool(stated)
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or []
    missing = {int(config["block_size"]) - int(method.get("speculative_tokens") or -1) for method in methods}
    if missing not in ({0}, {1}):
        raise CheckpointError(
            f"drafter config.json has neither {ANCHOR!r} nor speculative_tokens equal to block_size or one less, so "
            "it is unknown which token the first row of a block predicts"
        )
    return missing == {0}


def _check_layers(config: dict[str, Any], shape: dict[str, Any]) -> None:
    """Raise CheckpointError naming unsupported fields of the layers."""
    used = []
    if (activation := shape.get("hidden_act") or "silu") != "silu":
        used.append(f"hidden_act {activation!r}")
    if (size := config.get("target_hidden_size")) not in (None, shape.get("hidden_size")):
        used.append(f"target_hidden_size {size} with hidden_size {shape.get('hidden_size')}")
    if "sliding_attention" in (shape.get("layer_types") or []) and config.get("sliding_window_non_causal") is not False:
        used.append("sliding windows without sliding_window_non_causal: false")
    if used:
        raise CheckpointError(f"drafter uses {', '.join(used)}, which this loader does not support")
