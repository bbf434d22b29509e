"""DFlash 2 and LiLiCorr for one request in plain loops."""

from typing import Any

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


class Reference:
    """A folder's drafter with a target's embedding and head [V, d]."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, embedding: torch.Tensor, head: torch.Tensor) -> None:
        self.config, self.own = config, config["dflash_config"]
        self.tensors, self.embedding, self.head = tensors, embedding, head
        self.eps = config["rms_norm_eps"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = position / self.config["rope_theta"] ** (torch.arange(half).double() / half)
        turned = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.polar(angles * 0 + 1, angles)
        return torch.cat([turned.real, turned.imag], -1).float()

    def heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.linear(name, x).view(-1, self.config["head_dim"])

    def convolved(
        self, name: str, rows: list[torch.Tensor], given: list[torch.Tensor], side: int
    ) -> list[torch.Tensor]:
        if not self.own.get("conv_kernel_size"):
            return rows
        taps, group = self.own["conv_kernel_size"], self.own["conv_group_size"]
        base = self.tensors[f"{name}.base_kernel"]
        out = []
        for i, row in enumerate(rows):
            added = self.linear(f"{name}.kernel_projection", given[i]).view(2, taps, -1)
            total = torch.zeros_like(row)
            for tap in range(min(taps, i + 1)):
                kernel = base[side, tap] + added[side, tap].repeat_interleave(group)
                total = total + kernel * rows[i - tap]
            out.append(total)
        return out

    def hidden(self, anchor: int, features: torch.Tensor, gamma: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Final hidden states of the rows after the anchor's, and the context [N, d]."""
        context = norm(self.linear("fc", features), self.tensors["hidden_norm.weight"], self.eps)
        rows = [self.embedding[anchor]] + [self.embedding[self.own["mask_token_id"]]] * gamma
        for i in range(self.config["num_hidden_layers"]):
            layer, attention = f"layers.{i}", f"layers.{i}.self_attn"
            normed = [norm(row, self.tensors[f"{layer}.input_layernorm.weight"], self.eps) for row in rows]
            inputs = self.convolved(f"{layer}.attention_conv", normed, normed, 0)
            sources = [*context, *inputs]
            keys, values = [], []
            for position, source in enumerate(sources):
                key = norm(
                    self.heads(f"{attention}.k_proj", source), self.tensors[f"{attention}.k_norm.weight"], self.eps
                )
                keys.append(self.rotated(key, position))
                values.append(self.heads(f"{attention}.v_proj", source))
            out = []
            for j, row in enumerate(inputs):
                query = norm(
                    self.heads(f"{attention}.q_proj", row), self.tensors[f"{attention}.q_norm.weight"], self.eps
                )
                query = self.rotated(query, len(context) + j)
                heads = []
                first = self.first_seen(i, len(context) + j)
                for h, q in enumerate(query):
                    group = h * len(keys[0]) // len(query)
                    scores = torch.stack([q @ key[group] for key in keys[first:]]) / self.config["head_dim"] ** 0.5
                    heads.append(scores.softmax(0) @ torch.stack([value[group] for value in values[first:]]))
                out.append(self.linear(f"{attention}.o_proj", torch.cat(heads)))
            out = self.convolved(f"{layer}.attention_conv", out, normed, 1)
            rows = [row + more for row, more in zip(rows, out, strict=True)]
            normed = [norm(row, self.tensors[f"{layer}.post_attention_layernorm.weight"], self.eps) for row in rows]
            inputs = self.convolved(f"{layer}.mlp_conv", normed, normed, 0)
            out = [
                self.linear(
                    f"{layer}.mlp.down_proj",
                    F.silu(self.linear(f"{layer}.mlp.gate_proj", x)) * self.linear(f"{layer}.mlp.up_proj", x),
                )
                for x in inputs
            ]
            out = self.convolved(f"{layer}.mlp_conv", out, normed, 1)
            rows = [row + more for row, more in zip(rows, out, strict=True)]
        return [norm(row, self.tensors["norm.weight"], self.eps) for row in rows[1:]], context

    def first_seen(self, layer: int, position: int) -> int:
        """The first position that a layer's row at `position` sees; `is_causal` is false."""
        if self.config.get("layer_types", {layer: ""})[layer] != "sliding_attention":
            return 0
        return max(0, position + 1 - self.config["sliding_window"])

    def lattice(self, anchor: int, features: torch.Tensor, gamma: int) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Candidates of each position, and scores [K, K] of each after each earlier candidate."""
        hidden, context = self.hidden(anchor, features, gamma)
        logits = [(self.head @ row) * self.own.get("output_multiplier", 1.0) for row in hidden]
        if cap := self.own.get("final_logit_softcapping"):
            logits = [cap * (row / cap).tanh() for row in logits]
        if "selector_rank" in self.own:
            return self._codebooks(anchor, hidden, logits)
        return self._lilicorr(hidden, logits, context[-1])

    def _codebooks(self, anchor: int, hidden: list[torch.Tensor], logits: list[torch.Tensor]) -> Any:
        count = self.own["selector_top_k"]
        left, right = (self.tensors[f"candidate_selector.{side}_codebook"] for side in ("predecessor", "successor"))
        ids = [row.topk(count).indices.tolist() for row in logits]
        scores = []
        for k, (row, state) in enumerate(zip(logits, hidden, strict=True)):
            before = [anchor] * count if k == 0 else ids[k - 1]
            code = self.linear("candidate_selector.hidden_projection", state)
            scores.append(
                torch.stack([torch.stack([row[c] + (left[p] * code) @ right[c] for c in ids[k]]) for p in before])
            )
        return ids, scores

    def _lilicorr(self, hidden: list[torch.Tensor], logits: list[torch.Tensor], last: torch.Tensor) -> Any:
        own = {name.removeprefix("lilicorr_"): value for name, value in self.own.items()}
        count, block = own["candidate_topk"], self.config["block_size"]
        ids, x, slot = [], [], []
        for k, row in enumerate(logits):
            chances = row.log_softmax(-1)
            best = chances.topk(count).indices.tolist()
            ids.append(best)
            for rank, token in enumerate(best):
                own_chance = chances[token]
                features = [own_chance, own_chance.exp(), own_chance - chances[best[0]]]
                features += [torch.tensor(rank / (count - 1)), torch.tensor(float(rank == 0))]
                normed = F.layer_norm(
                    torch.stack(features), (5,), self.tensors["lilicorr.feature_norm.weight"],
                    self.tensors["lilicorr.feature_norm.bias"],
                )  # fmt: skip
                embedded = self.embedding[token]
                if "lilicorr.token_proj.weight" in self.tensors:
                    embedded = self.linear("lilicorr.token_proj", embedded)
                state = embedded + self.linear("lilicorr.pass_hidden_proj", hidden[k])
                state = state + self.mlp("lilicorr.feature_mlp", normed)
                state = state + self.tensors["lilicorr.slot_embedding"][0, 0, k, 0]
                x.append(state + self.tensors["lilicorr.rank_embedding"][0, 0, 0, rank])
                slot.append(k)
        states = torch.stack(x)
        relative, same = self.tensors["lilicorr.relative_slot_bias"], self.tensors["lilicorr.same_slot_bias"]
        for i in range(own["num_layers"]):
            name = f"lilicorr.layers.{i}"
            normed = norm(states, self.tensors[f"{name}.attn_norm.weight"], self.eps)
            qkv = F.linear(
                normed, self.tensors[f"{name}.attn.in_proj_weight"], self.tensors[f"{name}.attn.in_proj_bias"]
            )
            rows = []
            for h, (q, k, v) in enumerate(
                zip(*(part.chunk(own["num_heads"], -1) for part in qkv.chunk(3, -1)), strict=True)
            ):
                bias = torch.tensor(
                    [[relative[h, a - b + block - 1] + (same[h] if a == b else 0) for b in slot] for a in slot]
                )
                rows.append((q @ k.T / q.shape[1] ** 0.5 + bias).softmax(-1) @ v)
            states = states + self.linear(f"{name}.attn.out_proj", torch.cat(rows, -1))
            states = states + self.mlp(f"{name}.mlp", norm(states, self.tensors[f"{name}.mlp_norm.weight"], self.eps))
        states = norm(states, self.tensors["lilicorr.output_norm.weight"], self.eps)
        anchor = self.linear("lilicorr.context_proj", last)
        anchor = norm(anchor, self.tensors["lilicorr.anchor_norm.weight"], self.eps)
        both = torch.cat([states, anchor.expand_as(states), states * anchor], -1)
        vectors = F.silu(self.linear("lilicorr.factor_input_proj", both))
        leaving, entering = (
            F.normalize(self.linear(f"lilicorr.{side}_head", vectors), dim=-1, eps=own["vector_eps"])
            for side in ("out", "in")
        )
        first = F.normalize(self.linear("lilicorr.anchor_out_head", anchor), dim=-1, eps=own["vector_eps"])
        scores = []
        for k in range(len(logits)):
            before = first.expand(count, -1) if k == 0 else leaving[(k - 1) * count : k * count]
            scores.append(own["logit_scale"] * before @ entering[k * count : (k + 1) * count].T)
        return ids, scores

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.linear(f"{name}.down_proj", F.silu(self.linear(f"{name}.up_proj", x)))
