"""Makes the drafter that the configuration names, for the target as SGLang has loaded it."""

from typing import Any

from sglang.srt.runtime_context import get_parallel

from outrider.drafters import registry
from outrider.drafters.base import Drafter, Rows, Target
from outrider.drafters.corpora import Corpora

from ..config import PluginConfig

CAPTURE = "set_dflash_layers_to_capture"
"""Method of SGLang's models that expose hidden states."""


def load_drafter(config: PluginConfig, runner: Any, corpora: Corpora | None = None) -> Drafter | None:
    """Return the drafter for this server, or None where speculation is off. runner: SGLang's model runner of the
    target, its weights loaded. corpora: other texts for prompt lookup."""
    if config.drafter == "off":
        return None
    if registry.find(config.drafter).needs_hidden_states and not hasattr(runner.model, CAPTURE):
        raise ValueError(
            f"SGLang gives no hidden states of {type(runner.model).__name__} to drafters; "
            "use --drafter deer, specdiff, ngram or off"
        )
    return registry.make(
        config.drafter,
        loaded_target(runner, whole_weights(config, runner)),
        gamma=config.gamma,
        checkpoint=config.drafter_path,
        lookup_gamma=config.lookup_gamma,
        denoising_steps=config.denoising_steps,
        initial_tokens=config.initial_tokens,
        several_sets=config.learn_keys > 0,
        deferred=not config.role,
        corpora=corpora,
    )


def loaded_target(runner: Any, whole: tuple[Rows, Rows] | None) -> Target:
    """Return the drafters' view of the model in SGLang's model runner. whole: see `whole_weights`."""
    model, config = runner.model, runner.model_config.hf_text_config
    return Target(
        config=config,
        weights=lambda: whole or _weights(runner),
        dtype=runner.dtype,
        device=runner.device,
        capture_layers=getattr(model, CAPTURE, None),
    )


def whole_weights(config: PluginConfig, runner: Any) -> tuple[Rows, Rows] | None:
    """Return embedding and head, gathered on the first tensor-parallel rank from all ranks' parts of the vocabulary.
    All ranks call it. Returns None on the other ranks, on a single rank, and where no drafter reads them."""
    if config.drafter == "off" or not registry.find(config.drafter).needs_checkpoint:
        return None
    group = get_parallel().tp_group
    if group.world_size == 1:
        return None
    parts, count = _layers(runner), runner.model_config.hf_text_config.vocab_size
    once = parts[:1] if parts[0] is parts[1] else parts
    gathered = [group.gather(part.weight.data, dst=0, dim=0) for part in once]
    if group.rank_in_group != 0:
        return None
    embedding, head = gathered[0][:count], gathered[-1][:count]
    return embedding, head


def _weights(runner: Any) -> tuple[Rows, Rows]:
    count = runner.model_config.hf_text_config.vocab_size
    embedding, head = _layers(runner)
    return _rows(embedding, count), _rows(head, count)


def _layers(runner: Any) -> tuple[Any, Any]:
    return runner.model.model.embed_tokens, runner.model.lm_head


def _rows(layer: Any, count: int) -> Rows:
    """Return the weight of an embedding or a head without its padding, or a reader of its rows where it is kept in
    blocks."""
    return layer.rows.first(count) if hasattr(layer, "rows") else layer.weight[:count]
