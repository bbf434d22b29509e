"""A server on which answers can be compared to the last bit: float32, no shared prefixes, a small cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import MODEL
from running import Server

from outrider.drafters.block import BlockConfig, save_compact, target_identity
from outrider.drafters.diffusion import DiffusionModel
from outrider.profiles import store
from outrider.profiles.store import Profile
from outrider.scheduler.cost.step_times import Point
from outrider.server.engine import checkpoints, profile_lookup, target
from outrider.server.engine.settings import Settings

EXACT = ("--dtype", "float32", "--disable-radix-cache", "--max-total-tokens", "3072", "--context-length", "1024")
EXACT += ("--chunked-prefill-size", "32")
"""A cache for eight requests of these tests, not for twenty-four; most prompts are prefilled in several chunks."""

ALONE = ("dspark_server", "dflash_server", "deer_server", "specdiff_server")

TAKES_MANY = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}
"""A request gets in where the cache has room for so much of its answer, however long that becomes; some then have to
leave and come back. Not where `ignore_eos` is asked for: without shared prefixes SGLang then waits for room for all."""


@pytest.fixture(scope="session")
def exact_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model's weights in bfloat16, loaded as any folder's are; the other servers keep them in blocks."""
    model = ("--model", target.plain_folder(None), "--served-model-name", MODEL)
    yield from _serve(tmp_path_factory.mktemp("exact") / "log", *model, "--drafter", "ngram")


@pytest.fixture(scope="session")
def planned_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default drafter, planned: sampled drafts with a distribution of their own over a truncated vocabulary, text
    lookups among them, verification lengths by costs at which every decision of the planner occurs."""
    folder = tmp_path_factory.mktemp("planned")
    yield from _serve(folder / "log", "--profile", str(jagged_profile(folder)))


@pytest.fixture(scope="session")
def dspark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The model drafts everything, and every draft is verified."""
    yield from _serve(tmp_path_factory.mktemp("dspark") / "log", "--drafter", "dspark", "--no-lookup")


@pytest.fixture(scope="session")
def dflash_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory.mktemp("dflash") / "log", "--drafter", "dflash", "--no-lookup")


@pytest.fixture(scope="session")
def denoising_server(tmp_path_factory: pytest.TempPathFactory, diffusion_folder: Path) -> Iterator[Server]:
    """Four denoising steps of which a later one reveals what stands further left, planned, with lookups beside."""
    folder = tmp_path_factory.mktemp("denoising")
    flags = ("--drafter", "specdiff", "--drafter-path", str(diffusion_folder))
    flags += ("--denoising-steps", "4", "--denoising-order", "certain")
    profile = jagged_profile(
        folder, drafter="specdiff", drafter_path=str(diffusion_folder), denoising_steps=4, denoising_order="certain"
    )
    yield from _serve(folder / "log", *flags, "--profile", str(profile))


@pytest.fixture(scope="session")
def deer_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory.mktemp("deer") / "log", "--drafter", "deer", "--no-lookup")


@pytest.fixture(scope="session")
def specdiff_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory.mktemp("specdiff") / "log", "--drafter", "specdiff", "--no-lookup")


@pytest.fixture(scope="session")
def diffusion_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusion drafter for the embedded model. Its weights are random, but it knows 32 tokens alone, which the model
    likes in these tests, so that it is often right by chance."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = target.plain_folder(None)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    theirs = model.config
    config = BlockConfig(
        kind="diffusion", gamma=7, vocab_size=theirs.vocab_size, hidden_size=theirs.hidden_size,
        intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
        num_target_layers=theirs.num_hidden_layers, target_layers=(), mask_token_id=0, rope_theta=1e4,
        max_positions=theirs.max_position_embeddings, confidence_head=True, confidence_with_markov=False, qk_norm=False,
        draft_vocab_size=32, target=target_identity(theirs, model.get_input_embeddings().weight),
    )  # fmt: skip
    liked = tokenizer(" a b c d the of and to in is , . \n : that for with as The", add_special_tokens=False)
    known = dict.fromkeys([*liked["input_ids"], *tokenizer("abcd,.:;-()12345", add_special_tokens=False)["input_ids"]])
    known |= dict.fromkeys(range(100, 132))
    torch.manual_seed(0)
    drafter = DiffusionModel(config, torch.tensor(list(known)[:32]).sort().values)
    for p in drafter.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.05)
    folder = tmp_path_factory.mktemp("diffusion")
    save_compact(drafter, folder)
    return folder


@pytest.fixture(scope="module")
def int8_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory.mktemp("int8") / "log", "--quantization", "int8")


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Server:
    """The server named by a test's parameter; a drafter on its own only with --exhaustive."""
    if request.param in ALONE and not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive serves each model drafter on its own as well")
    found: Server = request.getfixturevalue(request.param)
    return found


def _serve(log: Path, *flags: str) -> Iterator[Server]:
    started = Server(log, *EXACT, *flags, **TAKES_MANY)
    try:
        yield started.wait_until_ready()
    finally:
        started.stop()


def jagged_profile(folder: Path, **drafter: Any) -> Path:
    """A profile for the default drafter, or the one of these settings, whose costs have cliffs at every sixth token up
    to 24 and at 96, and by which drafting never pays for two requests: not drafting, drafts of few tokens, short and
    long verification all win at times."""
    model = target.find(None)
    settings = checkpoints.with_drafter_path(Settings(dtype="float32", **drafter), model)
    points = [
        Point(
            requests,
            requests * tokens,
            requests * 128.0,
            (0.01 + 0.003 * min(requests * tokens // 6, 4) + (0.03 if requests * tokens > 96 else 0.0),),
        )
        for requests in (1, 2, 4, 8, 32)
        for tokens in range(1, 9)
    ]
    points += [
        Point(requests, 0, requests * 128.0, (0.05 if requests == 2 else 0.0005 * requests,), drafted=True)
        for requests in (1, 2, 4, 8, 32, 256)
    ]
    profile = Profile(
        name="jagged",
        fingerprint=profile_lookup.fingerprint(settings, model),
        points=tuple(points),
        thorough=True,
        measured_at="2026-01-01T00:00:00+00:00",
        measured_how="made up by a test",
    )
    saved = store.save(profile, folder, None)
    assert saved.folder is not None
    return saved.folder


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Fifty prompts: code, arithmetic, chat. A line that begins with a space or is empty belongs to the one before."""
    found: list[str] = []
    for line in Path(__file__).with_name("prompts.txt").read_text().splitlines():
        if found and (line.startswith(" ") or line == "" or found[-1].endswith("\n")):
            found[-1] += "\n" + line
        else:
            found.append(line)
    return found
