"""Tiny random drafters and a tiny target."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from chi_square import p_value
from margins import assert_near
from tiny_eagle import save_eagle
from tiny_mtp import save_mtp
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.drafters import registry
from outrider.drafters.base import Draft, DraftBatch, Drafter, Features, Prefilled, Target
from outrider.drafters.block.checkpoint import save_compact
from outrider.drafters.block.choosing import CodebookChoosing, Convolution, LatticeChoosing
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.model import BlockModel, DraftModel
from outrider.drafters.diffusion.model import DiffusionModel
from outrider.drafters.networks import read_config
from outrider.drafters.training import measure
from outrider.drafters.training.features import sequence_features
from outrider.drafters.training.store import Sequence
from outrider.drafters.training.target import TargetModel
from outrider.kernels.noise import Purpose, streams

Model = TypeVar("Model", bound=DraftModel)
TINY = BlockConfig(
    kind="dspark", gamma=4, vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, num_target_layers=6, target_layers=(1, 3, 4), mask_token_id=7, rope_theta=10000.0,
    max_positions=256, markov_rank=8, confidence_head=True,
)  # fmt: skip
TRUNCATED = dataclasses.replace(TINY, draft_vocab_size=40)
RNN = dataclasses.replace(TRUNCATED, markov_head="rnn")
GATED = dataclasses.replace(TINY, markov_head="gated")
BEHIND = dataclasses.replace(TINY, sample_from_anchor=False)
DFLASH = dataclasses.replace(TINY, kind="dflash", markov_rank=0, confidence_head=False, confidence_with_markov=False)
DFLASH2 = dataclasses.replace(
    DFLASH, kind="dflash2", choosing=CodebookChoosing(candidates=16, rank=8), convolution=Convolution(taps=2, group=8)
)
LILICORR = dataclasses.replace(
    DFLASH2,
    convolution=Convolution(taps=3, group=16),
    choosing=LatticeChoosing(
        candidates=16, width=24, layers=2, heads=2, mlp_ratio=1.5, factors=6, eps=1e-4, scale=40.0
    ),
)  # fmt: skip
# The kernels need heads of 32 and convolutions of 16 channels.
WIDE = dataclasses.replace(TRUNCATED, hidden_size=64, intermediate_size=96, head_dim=32)
WIDE_DFLASH = dataclasses.replace(DFLASH, hidden_size=64, intermediate_size=96, head_dim=32)
WIDE_DFLASH2 = dataclasses.replace(
    WIDE_DFLASH, kind="dflash2", choosing=DFLASH2.choosing, convolution=Convolution(taps=2, group=16)
)
WIDE_LILICORR = dataclasses.replace(WIDE_DFLASH2, choosing=LILICORR.choosing, convolution=Convolution(taps=3, group=32))
PATHS = {
    "dflash2": DFLASH2,
    "dflash2, open windows": dataclasses.replace(
        DFLASH2, windows=(6, -1), open_windows=True, logit_scale=0.5, logit_cap=5.0
    ),
    "lilicorr": LILICORR,
    "lilicorr as wide": dataclasses.replace(
        LILICORR, convolution=None, choosing=dataclasses.replace(LILICORR.choosing, width=0)
    ),
}
WIDE_PATHS = {"wide dflash2": WIDE_DFLASH2, "wide lilicorr": WIDE_LILICORR}
DIFFUSION = dataclasses.replace(
    TINY, kind="diffusion", target_layers=(), mask_token_id=0, markov_rank=0, confidence_with_markov=False
)
FEW_DIFFUSION = dataclasses.replace(DIFFUSION, draft_vocab_size=40)
# As started from a Llama, with shapes that the compiled kernels take.
WIDE_DIFFUSION = dataclasses.replace(
    DIFFUSION, hidden_size=64, intermediate_size=96, head_dim=32, qk_norm=False, draft_vocab_size=40
)
UNSURE_DIFFUSION = dataclasses.replace(DIFFUSION, confidence_head=False)
DIFFUSIONS = {"diffusion": DIFFUSION, "wide diffusion": WIDE_DIFFUSION, "without confidence": UNSURE_DIFFUSION}
CONFIGS = {
    "dspark": TINY, "truncated": TRUNCATED, "rnn": RNN, "gated": GATED, "behind": BEHIND, "dflash": DFLASH,
    "wide": WIDE, "wide dflash": WIDE_DFLASH,
}  # fmt: skip


def make_sequence(length: int, prompt: int, width: int = 4) -> Sequence:
    """Tokens 0, 1, 2 ..., the first `prompt` of them the prompt's, with random features."""
    answer = length - prompt
    return Sequence(
        torch.arange(length), prompt, torch.randn(length, width).bfloat16(),
        torch.randint(0, 96, (answer, 3)), torch.rand(answer, 3).half().float(),
    )  # fmt: skip


def make_model(config: BlockConfig, seed: int = 0) -> BlockModel:
    """A model with random weights, all large enough to matter."""
    return _random(BlockModel, config, seed)


def make_diffusion(config: BlockConfig, seed: int = 0) -> DiffusionModel:
    return _random(DiffusionModel, config, seed)


def _random(network: type[Model], config: BlockConfig, seed: int) -> Model:
    torch.manual_seed(seed)
    vocab = torch.randperm(config.vocab_size)[: config.logit_size].sort().values
    model = network(config, vocab)
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=1.0 if p.ndim == 1 else 0.0, std=0.3)
    return model.requires_grad_(False)


def make_drafter(config: BlockConfig, seed: int = 0, slots: int = 256) -> BlockDrafter:
    model = make_model(config, seed)
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    head = torch.randn(config.vocab_size, config.hidden_size) * 0.5
    drafter = BlockDrafter(model, embedding=embedding, head=head)
    drafter.allocate(slots)
    return drafter


def make_target(config: Any, embedding: torch.Tensor, head: torch.Tensor | None = None) -> Target:
    """The target for the registry; without a head it shares the embedding."""
    weights = (embedding, embedding if head is None else head)
    return Target(config=config, weights=lambda: weights, dtype=torch.float32, device="cpu")


TERMS = 4000
"""A bound on consecutive additions in these models: 600 in each of six layers or of a chain's four passes, 192 in the
projection of features, 64 in a head. Near 1, a confidence moves by up to 1,600 epsilons per epsilon of the largest
chance (`drafters/confidence.py`)."""


def assert_same_draft(one: Draft, other: Draft) -> None:
    """Equal up to the order of sums: drafted tokens, confidences and q."""
    assert torch.equal(one.lens, other.lens)
    drafted = torch.arange(one.tokens.shape[1]) < one.lens[:, None]
    assert torch.equal(one.tokens[drafted], other.tokens[drafted])
    assert_near(one.confidence[drafted], other.confidence[drafted], TERMS)
    assert (one.probs is None) == (other.probs is None)
    if one.probs is not None and other.probs is not None:
        drafted = drafted[:, : one.probs.shape[1]]
        assert_near(one.probs[drafted], other.probs[drafted], TERMS)


def row_of(draft: Draft, row: int) -> Draft:
    probs = None if draft.probs is None else draft.probs[[row]]
    tokens, lens, confidence = draft.tokens[[row]], draft.lens[[row]], draft.confidence[[row]]
    return dataclasses.replace(draft, tokens=tokens, lens=lens, confidence=confidence, probs=probs)


GAMMA = 3
"""Draft tokens of `make_registered`, fewer than the models' own."""


def make_registered(
    name: str, folder: Path, *, lookup_gamma: int = 0, several_sets: bool = False, deferred: bool = True, seed: int = 0
) -> tuple[Drafter, list[int]]:
    """The registry's drafter of that name, and the layers that it captures."""
    captured: list[int] = []
    config = SimpleNamespace(model_type="llama", hidden_size=32, num_hidden_layers=6, vocab_size=96)
    target = dataclasses.replace(make_target(config, torch.randn(96, 32)), capture_layers=captured.extend)
    checkpoint = str(save_registered(name, folder, seed)) if registry.find(name).needs_checkpoint else ""
    made = registry.make(
        name, target, gamma=GAMMA, checkpoint=checkpoint, lookup_gamma=lookup_gamma, several_sets=several_sets,
        deferred=deferred,
    )  # fmt: skip
    return made, captured


def save_registered(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a random drafter of that name; returns `folder`."""
    if name == "eagle3":
        return save_eagle(folder, seed=seed)
    if name == "mtp":
        return save_mtp(folder, seed=seed)
    block = (CONFIGS | PATHS).get(name)
    save_compact(make_diffusion(FEW_DIFFUSION, seed) if block is None else make_model(block, seed), folder)
    return folder


WORDS = ["<unk>", "<s>", "</s>", "user", "assistant", *(f"w{i}" for i in range(91))]


def save_target(folder: Path, *, hidden_size: int = 32, intermediate_size: int = 48, heads: int = 4) -> Path:
    """A random Llama, by default one for the configs above, with a tokenizer of 96 words."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96, hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=6,
            num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=256,
            tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, initializer_range=0.3,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.pad_token = "</s>"
    tokenizer.chat_template = (
        "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"
        "{% if add_generation_prompt %}<s> assistant {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def batch(table: torch.Tensor, rows: list[int], lengths: list[int], temperature: float = 0.0) -> DraftBatch:
    generator = torch.Generator().manual_seed(1)
    return DraftBatch(
        anchors=torch.tensor([3 + r for r in rows]), seq_lens=torch.tensor(lengths), page_table=table,
        rows=torch.tensor(rows), temperatures=torch.full((len(rows),), temperature),
        keys=torch.randint(2**62, (len(table), TINY.gamma), generator=generator)[rows],
    )  # fmt: skip


def draft_after(drafter: Drafter, ids: torch.Tensor, hidden: torch.Tensor | None, temperature: float = 0.0) -> Draft:
    """The draft of a new drafter after tokens `ids` [n] with states `hidden` [n, width], and an anchor."""
    drafter.allocate(256)
    places = torch.arange(len(ids))
    drafter.observe(Features(hidden, ids, places, places))
    one = torch.zeros(1, dtype=torch.int64)
    return drafter.propose(
        DraftBatch(
            anchors=one + 3, seq_lens=one + len(ids), page_table=torch.arange(256).int()[None], rows=one,
            temperatures=torch.full((1,), temperature), keys=torch.arange(drafter.gamma)[None],
        )
    )  # fmt: skip


def check_tokens_follow_q(drafter: Drafter, table: torch.Tensor, *, positions: Iterable[int], draws: int) -> None:
    """Check that tokens of many keys follow q_k, given the prefix, and that q follows the rules.

    The request is row 0 of the page table, with 9 tokens.
    """
    for k in positions:
        keys = torch.full((draws, drafter.gamma), 37)
        keys[:, k] = streams(torch.arange(draws), torch.full((draws,), k), Purpose.DRAFT)
        many = DraftBatch(
            anchors=torch.full((draws,), 3), seq_lens=torch.full((draws,), 9), page_table=table,
            rows=torch.zeros(draws, dtype=torch.int64), keys=keys, temperatures=torch.full((draws,), 4.0),
            top_ks=torch.full((draws,), 12),
        )  # fmt: skip
        draft = drafter.propose(many)
        columns = draft.tokens[:, k].contiguous()
        if draft.vocab is not None:
            columns = torch.searchsorted(draft.vocab, columns)
        q = draft.probs[0, k]
        assert int((q > 0).sum()) == 12
        assert p_value(Counter(columns.tolist()), dict(enumerate(q.tolist())), draws) > 1e-3


def check_draws_are_unseen(drafter: Any, base: DraftBatch) -> bool:
    """Check that the draws from position k on change neither lengths, nor tokens before k, nor confidences and q up to
    k. Returns whether each of them changed token k."""
    drafter.propose(base)  # takes in all tokens now: a later, larger pass would round differently
    seen, changed = drafter.propose(base), []
    for k in range(drafter.gamma):
        keys = base.keys.clone()
        keys[:, k:] += 5
        redrawn = drafter.propose(dataclasses.replace(base, keys=keys))
        assert torch.equal(seen.lens, redrawn.lens)
        assert torch.equal(seen.tokens[:, :k], redrawn.tokens[:, :k])
        assert torch.equal(seen.confidence[:, : k + 1], redrawn.confidence[:, : k + 1])
        assert (seen.probs is None) == (redrawn.probs is None)
        assert seen.probs is None or torch.equal(seen.probs[:, : k + 1], redrawn.probs[:, : k + 1])
        changed.append(not torch.equal(seen.tokens[:, k], redrawn.tokens[:, k]))
    return all(changed)


def check_history_is_forgotten(slots: torch.Tensor, make: Callable[[], Any], read: Callable[..., None]) -> None:
    """Check that a drafter with a history drafts as a fresh one on the host: chunks, steps with and without drafts,
    rejected drafts, another request's prefix, reused slots, and a retracted request.

    slots: of four texts. read(drafter, table, life, row, start, stop): observe tokens of a text, which is another in
    each life; row 3 begins with 20 tokens of row 0.
    """
    used, generator = make(), torch.Generator().manual_seed(0)

    def dice(sides: int) -> int:
        return int(torch.randint(sides, (), generator=generator))

    for life in range(3):
        table = slots[torch.randperm(len(slots), generator=generator)].view(4, -1)  # the same slots, reused
        lens = dict.fromkeys(range(3), 0)
        while min(lens.values()) < 40:
            row = dice(len(lens))
            stop = min(40, lens[row] + 1 + dice(6))
            read(used, table, life, row, lens[row], stop)
            if stop > lens[row] and dice(2):
                used.prefilled(Prefilled(table, torch.tensor([row]), torch.tensor([stop]), [stop - lens[row]], stop))
            lens[row] = stop
            if 3 not in lens and lens[0] > 20:
                table[3, :20] = table[0, :20]
                lens[3] = 20
            if dice(3) == 0:
                rows = [row for row in lens if lens[row]]
                drafting = batch(table, rows, [lens[row] for row in rows], float(dice(2)))
                fresh = make()
                fresh.on_host = True
                for row in rows:
                    read(fresh, table, life, row, 0, lens[row])
                assert_same_draft(used.propose(drafting), fresh.propose(drafting))


def check_what_measuring_finds(
    load: Callable[..., Drafter], target_folder: Path, folder: Path, prompts: Path, *, least: float = 1.3
) -> None:
    """Check that a trained folder's measured accepted length equals decoding step by step, and is at least `least`.
    load: makes the drafter."""
    target = TargetModel.load(str(target_folder), dtype=torch.float32)
    drafter = load(make_target(target.config, target.embedding, target.head), folder, gamma=read_config(folder).gamma)
    prompts.write_text("".join(reversed(prompts.read_text().splitlines(keepends=True))))  # the first ones are held out
    answers = measure.target_answers(target, str(prompts), count=6, new_tokens=20, temperature=0.0, kept=None)
    (measured,) = measure.measure(target, measure.arms_of([folder], [1]), answers)
    read = sequence_features(target, answers, drafter.target_layers, 1)
    assert measured.cycles == sum(len(decode_along(drafter, sequence)[0]) for sequence in read)
    assert measured.accepted_length >= least


def decode_along(drafter: Drafter, s: Sequence) -> tuple[list[int], torch.Tensor]:
    """Accepted tokens of each step along a known answer, and confidences [steps, gamma]."""
    drafter.allocate(256)
    table = torch.arange(256, dtype=torch.int32)[None]
    seen, at, accepted, confidence = 0, s.prompt, [], []
    while at < len(s.tokens) - 1:
        places = torch.arange(seen, at)
        hidden = s.features[seen:at] if drafter.target_layers else None
        drafter.observe(Features(hidden, s.tokens[seen:at], places, places))
        seen = at
        draft = drafter.propose(
            DraftBatch(
                anchors=s.tokens[at : at + 1], seq_lens=torch.tensor([at]), page_table=table,
                keys=torch.zeros(1, drafter.gamma, dtype=torch.int64), rows=torch.zeros(1, dtype=torch.int64),
                temperatures=torch.zeros(1), wants_probs=False,
            )
        )  # fmt: skip
        true = s.tokens[at + 1 : at + 1 + drafter.gamma]
        accepted.append(int((draft.tokens[0, : len(true)] == true).long().cumprod(0).sum()))
        confidence.append(draft.confidence[0])
        at += accepted[-1] + 1
    return accepted, torch.stack(confidence)
