"""Servers with answers that can be compared bit by bit: float32, no shared prefixes, a small cache. They stop after
this folder's last test, as memory does not hold all servers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import ONE_THREAD, TAKES_MANY, ForkedServer, Server, changed
from small_mtp import SmallMtp
from small_target import SmallTarget

from outrider.profiles import store
from outrider.profiles.store import Profile
from outrider.scheduler.cost.step_times import Point
from outrider.server.cli.main import main
from outrider.server.model import bundled_model, target
from outrider.server.settings import checkpoints, profile_lookup
from outrider.server.settings.settings import Settings

EXACT = ("--dtype", "float32", "--disable-radix-cache", "--max-total-tokens", "3072", "--context-length", "1024")
EXACT += ("--chunked-prefill-size", "32", "--no-lookup-across")
"""The cache holds eight requests of these tests; most prompts are prefilled in several chunks. Tests count drafts by
source over repeated prompts, so drafts depend on their own request only. `test_across.py`, `test_failures.py` and all
other servers look texts up across requests."""
SHARING = tuple(flag for flag in EXACT if flag != "--disable-radix-cache")

SHIPPED = ("shipped_server", "dspark_server", "dflash_server", "deer_server", "specdiff_server")


@pytest.fixture(scope="package")
def exact_server(tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget) -> Iterator[Server]:
    """The small target; its model drafts where lookup finds no match, and every draft is verified.

    It uses all cores and starts as for users; the other servers of the small target use one thread and are forked.
    """
    flags = (*small_target.flags(), "--planner", "verify-all")
    yield from _serve(tmp_path_factory.mktemp("exact") / "log", *EXACT, *flags, kind=Server)


@pytest.fixture(scope="package")
def planned_server(tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget) -> Iterator[Server]:
    """Planned, with costs at which every decision of the planner occurs; requests share prefixes."""
    yield from _planned(tmp_path_factory.mktemp("planned"), small_target, "dspark", small_target.dspark)


@pytest.fixture(scope="package")
def eagle_server(tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget) -> Iterator[Server]:
    """An EAGLE-3 head; the planner also decides its depth."""
    yield from _planned(tmp_path_factory.mktemp("eagle"), small_target, "eagle3", small_target.eagle3)


@pytest.fixture(scope="package")
def small_mtp(tmp_path_factory: pytest.TempPathFactory) -> SmallMtp:
    return SmallMtp.write(tmp_path_factory.mktemp("small-mtp") / "target")


@pytest.fixture(scope="package")
def mtp_server(tmp_path_factory: pytest.TempPathFactory, small_mtp: SmallMtp) -> Iterator[Server]:
    """A target with an MTP layer, which `auto` chooses; planned, with shared prefixes."""
    folder = tmp_path_factory.mktemp("mtp")
    profile = jagged_profile(folder, model=str(small_mtp.folder), drafter="mtp")
    flags = ("--model", str(small_mtp.folder), "--served-model-name", bundled_model.NAME, "--profile", str(profile))
    yield from _serve(folder / "log", *SHARING, *flags, **changed("profile-costs"))


@pytest.fixture(scope="package")
def path_server(tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget) -> Iterator[Server]:
    """DFlash 2; every draft is verified, and requests share prefixes."""
    flags = (*small_target.flags("dflash2"), "--planner", "verify-all")
    yield from _serve(tmp_path_factory.mktemp("paths") / "log", *SHARING, *flags)


@pytest.fixture(scope="package")
def lattice_server(tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget) -> Iterator[Server]:
    """LiLiCorr; every draft is verified."""
    flags = (*small_target.flags("dflash2", small_target.lilicorr), "--gamma", "3", "--planner", "verify-all")
    yield from _serve(tmp_path_factory.mktemp("lattice") / "log", *SHARING, *flags)


@pytest.fixture(scope="module")
def trained_eagle_server(tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget) -> Iterator[Server]:
    """An EAGLE-3 head just trained by `outrider train`; every draft is verified."""
    folder = tmp_path_factory.mktemp("trained")
    given = [f"train eagle3 --target {small_target.folder} --out {folder} --self-prompts 16"]
    given += ["--answer-tokens 96 --temperatures 0 --steps 120 --short-steps 0 --decay-steps 0 --lr 3e-3 --warmup 5"]
    given += ["--draft-vocab 512 --device cpu --dtype float32"]
    assert main(" ".join(given).split()) == 0
    flags = (*small_target.flags("eagle3", folder / "drafter"), "--planner", "verify-all", "--no-lookup")
    yield from _serve(folder / "log", *EXACT, *flags)


def _planned(folder: Path, small_target: SmallTarget, drafter: str, path: Path) -> Iterator[Server]:
    profile = jagged_profile(folder, model=str(small_target.folder), drafter=drafter, drafter_path=str(path))
    flags = (*SHARING, *small_target.flags(drafter, path), "--profile", str(profile))
    yield from _serve(folder / "log", *flags, **changed("profile-costs"))


@pytest.fixture(scope="package")
def late_server(tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget) -> Iterator[Server]:
    """Every draft is verified; steps overlap, so the host learns results late."""
    flags = (*small_target.flags(), "--planner", "verify-all")
    yield from _serve(tmp_path_factory.mktemp("late") / "log", *EXACT, *flags, **changed("overlap"))


@pytest.fixture(scope="package")
def denoising_server(tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget) -> Iterator[Server]:
    """Three denoising steps, the last one of two tokens; confidences decide how much is verified. The first tokens of
    an answer are not drafted."""
    flags = small_target.flags("specdiff")
    flags += ("--gamma", "4", "--denoising-steps", "3", "--initial-tokens", str(INITIAL))
    flags += ("--planner", "threshold", "--threshold", "0.05")
    yield from _serve(tmp_path_factory.mktemp("denoising") / "log", *EXACT, *flags)


INITIAL = 2
"""`--initial-tokens` of the denoising server."""


@pytest.fixture(scope="package")
def shipped_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model with weights in blocks, and the default drafter with its truncated vocabulary."""
    folder = tmp_path_factory.mktemp("shipped")
    yield from _serve(folder / "log", *EXACT, "--profile", str(jagged_profile(folder)))


@pytest.fixture(scope="package")
def dspark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model; its drafter drafts every token, and every draft is verified."""
    yield from _serve(tmp_path_factory.mktemp("dspark") / "log", *EXACT, "--drafter", "dspark", "--no-lookup")


@pytest.fixture(scope="package")
def dflash_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory.mktemp("dflash") / "log", *EXACT, "--drafter", "dflash", "--no-lookup")


@pytest.fixture(scope="package")
def deer_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory.mktemp("deer") / "log", *EXACT, "--drafter", "deer", "--no-lookup")


@pytest.fixture(scope="package")
def specdiff_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _serve(tmp_path_factory.mktemp("specdiff") / "log", *EXACT, "--drafter", "specdiff", "--no-lookup")


@pytest.fixture(scope="module")
def int8_server(tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget) -> Iterator[Server]:
    flags = (*small_target.flags(), "--quantization", "int8")
    yield from _serve(tmp_path_factory.mktemp("int8") / "log", *EXACT, *flags)


@pytest.fixture(scope="module")
def rounding_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model with integer products; every draft is verified."""
    flags = ("--activations", "int8", "--planner", "verify-all")
    yield from _serve(tmp_path_factory.mktemp("rounding") / "log", *EXACT, *flags)


@pytest.fixture
def drafter(request: pytest.FixtureRequest) -> str:
    """Name of the learning drafter: a test's parameter, else DSpark."""
    return getattr(request, "param", "dspark")


@pytest.fixture
def start_learning(tmp_path: Path, small_target: SmallTarget, drafter: str) -> Iterator[Callable[..., Server]]:
    """Starts learning servers of the small target, one after another; they learn in `tmp_path`/learned."""
    flags = (*small_target.flags(drafter), "--planner", "verify-all")
    flags += ("--learn", "--learn-folder", str(tmp_path / "learned"))
    started: list[Server] = []

    def start(*more: str, change: str = "") -> Server:
        log = tmp_path / f"log-{len(started)}"
        started.append(ForkedServer(log, *SHARING, *flags, *more, **changed("hurries", change)))
        return started[-1].wait_until_ready()

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Server:
    """The server named by a test's parameter; the embedded model in float32 only with --exhaustive."""
    if request.param in SHIPPED and not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive serves the embedded model with each of its drafters")
    server: Server = request.getfixturevalue(request.param)
    return server


def _serve(log: Path, *flags: str, kind: type[Server] = ForkedServer, **env: str) -> Iterator[Server]:
    with kind(log, *flags, **TAKES_MANY | env) as started:
        yield started


def jagged_profile(folder: Path, **settings: Any) -> Path:
    """A profile for the embedded model and its drafter, or for these settings.

    Its costs jump at every sixth token up to 24 and rise steadily after that; drafting never pays at 256 requests. So
    all kinds of plans occur.
    """
    wanted = Settings(dtype="float32", activations="float", threads=1 if ONE_THREAD else None, **settings)
    model = target.find(wanted.model)
    known = checkpoints.with_drafter_path(wanted, model)
    points = [
        Point(
            requests,
            requests * tokens,
            requests * 128.0,
            (0.01 + 0.001 * min(requests * tokens // 6, 4) + 0.00002 * requests * tokens,),
        )
        for requests in (1, 2, 4, 8, 32, 64)
        for tokens in range(1, 9)
    ]
    points += [
        Point(requests, 0, requests * 128.0, (0.5 if requests == 256 else 0.001 + 0.00002 * requests,))
        for requests in (1, 2, 4, 8, 32, 64, 256)
    ]
    profile = Profile(
        name="jagged", fingerprint=profile_lookup.fingerprint(known, model), points=tuple(points), thorough=True,
        measured_at="2026-01-01T00:00:00+00:00", measured_how="made up by a test",
    )  # fmt: skip
    saved = store.save(profile, folder, None)
    assert saved.folder is not None
    return saved.folder


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Fifty prompts: code, arithmetic, chat. A line that is empty or begins with a space continues the previous one."""
    lines: list[str] = []
    for line in Path(__file__).with_name("prompts.txt").read_text().splitlines():
        if lines and (line.startswith(" ") or line == "" or lines[-1].endswith("\n")):
            lines[-1] += "\n" + line
        else:
            lines.append(line)
    return lines
