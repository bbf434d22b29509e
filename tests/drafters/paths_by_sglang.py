"""Computes with SGLang's own convolution, selector and LiLiCorr head: paths_by_sglang.py GIVEN FOUND.

GIVEN is saved by torch: tensors by model, LiLiCorr's config, and inputs. FOUND gets the outputs. Uncompiled, since
compilation takes a minute.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from sglang.srt.models.dflash import CandidateSelector, DFlashGroupedConv
from sglang.srt.models.lilicorr import LiLiCorrHead
from sglang.srt.speculative.lilicorr_utils import parse_lilicorr_draft_config
from single_rank import publish_alone


def part(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def main(file: str, outputs: str) -> None:
    given: dict[str, Any] = torch.load(file)
    publish_alone(model_path="none", dtype="float32", skip_tokenizer_init=True)
    hidden, logits = given["hidden"], given["logits"]
    two, lattice = given["states"]["dflash2"], given["states"]["lilicorr"]
    with torch.inference_mode():
        convolution = DFlashGroupedConv(hidden.shape[-1], hidden.shape[1] + 1, 2, 8)
        convolution.load_state_dict(part(two, "layers.0.mlp_conv."))
        before, kernels = convolution.prepare(given["x"])
        behind = convolution.finish(given["x"], kernels)
        codes = two["candidate_selector.predecessor_codebook"]
        values, ids = logits.topk(16, -1)
        selector = CandidateSelector(
            hidden_size=hidden.shape[-1], vocab_size=len(codes), state_rank=codes.shape[1], top_k=16
        )
        selector.load_state_dict(part(two, "candidate_selector."))
        scores = selector.build_lattice(
            candidate_ids=ids, unary_logits=values, hidden_states=hidden, anchor_token_ids=given["anchors"]
        )
        config = SimpleNamespace(**given["config"])
        head = LiLiCorrHead(
            model_hidden_size=hidden.shape[-1],
            block_size=config.block_size,
            rms_norm_eps=config.rms_norm_eps,
            config=parse_lilicorr_draft_config(draft_hf_config=config),
        )
        head.load_state_dict(part(lattice, "lilicorr."))
        head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
        chances = logits.log_softmax(-1).topk(16, -1).values
        start, pairs = head.score(
            token_embeddings=given["embedding"][ids][:, None],
            candidate_log_probs=chances[:, None],
            pass_hidden=hidden[:, None],
            anchor_hidden=given["context"][:, None],
            anchor_valid=torch.ones(len(ids), 1, dtype=torch.bool),
        )
        first, pairs = head.log_factors(start[:, 0], pairs[:, 0])
    results = {"convolved": [before, behind], "selector": scores, "first": first, "pairs": pairs}
    torch.save(results, outputs)
    print("null")


if __name__ == "__main__":
    main(*sys.argv[1:])
