"""Servers with answers that can be compared bit by bit: float32, no shared prefixes, a small cache. They stop after
this folder's last test, as memory does not hold all servers."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from adapters import merged, write_adapter
from running import ONE_THREAD, TAKES_MANY, ForkedServer, Server, changed
from small_mtp import SmallMtp
from small_target import SmallTarget
from transformers import PreTrainedModel

from outrider.profiles import store
from outrider.profiles.store import Profile
from outrider.scheduler.cost.step_times import Point
from outrider.server.http.keys import key_file
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


ALL = ("--planner", "verify-all")
INITIAL = 2
"""`--initial-tokens` of the denoising server."""


def serving(name: str, *flags: str, scope: Any = "package", kind: type[Server] = ForkedServer, **env: str) -> Any:
    """The fixture `name`_server: the embedded model, in float32 with these flags."""

    @pytest.fixture(scope=scope, name=f"{name}_server")
    def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        yield from _serve(tmp_path_factory.mktemp(name) / "log", *EXACT, *flags, kind=kind, **env)

    return started


def serving_small(
    name: str, *flags: str, drafter: str = "dspark", of: str = "", scope: Any = "package",
    kind: type[Server] = ForkedServer, **env: str,
) -> Any:  # fmt: skip
    """The fixture `name`_server: the small target with a drafter. of: a field of `SmallTarget` with its folder."""

    @pytest.fixture(scope=scope, name=f"{name}_server")
    def started(tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget) -> Iterator[Server]:
        model = small_target.flags(drafter, getattr(small_target, of) if of else None)
        yield from _serve(tmp_path_factory.mktemp(name) / "log", *flags, *model, kind=kind, **env)

    return started


def planned(name: str, drafter: str) -> Any:
    """The fixture `name`_server: the small target, planned with costs at which every decision of the planner occurs;
    requests share prefixes."""

    @pytest.fixture(scope="package", name=f"{name}_server")
    def started(tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget) -> Iterator[Server]:
        folder, path = tmp_path_factory.mktemp(name), small_target.drafters[drafter]
        profile = jagged_profile(folder, model=str(small_target.folder), drafter=drafter, drafter_path=str(path))
        flags = (*SHARING, *small_target.flags(drafter, path), "--profile", str(profile))
        yield from _serve(folder / "log", *flags, **changed("profile-costs"))

    return started


exact_server = serving_small("exact", *EXACT, *ALL, kind=Server)
"""Its model drafts where lookup finds no match. It uses all cores and starts as for users; the other servers of the
small target use one thread and are forked."""
late_server = serving_small("late", *EXACT, *ALL, **changed("overlap"))
"""Steps overlap, so the host learns results late."""
path_server = serving_small("path", *SHARING, *ALL, drafter="dflash2")
lattice_server = serving_small("lattice", *SHARING, *ALL, "--gamma", "3", drafter="dflash2", of="lilicorr")
denoising_server = serving_small(
    "denoising", *EXACT, "--gamma", "4", "--denoising-steps", "3", "--initial-tokens", str(INITIAL), "--planner",
    "threshold", "--threshold", "0.05", drafter="specdiff",
)  # fmt: skip
"""Three denoising steps, the last one of two tokens; confidences decide how much is verified. The first tokens of an
answer are not drafted."""
int8_server = serving_small("int8", *EXACT, "--quantization", "int8", scope="module")
planned_server, eagle_server = planned("planned", "dspark"), planned("eagle", "eagle3")
"""The planner of an EAGLE-3 head also decides its depth."""
rounding_server = serving("rounding", "--activations", "int8", *ALL, scope="module")
"""Integer products."""
dspark_server = serving("dspark", "--drafter", "dspark", "--no-lookup")
"""The drafter drafts every token, and every draft is verified."""
dflash_server = serving("dflash", "--drafter", "dflash", "--no-lookup")
deer_server = serving("deer", "--drafter", "deer", "--no-lookup")
specdiff_server = serving("specdiff", "--drafter", "specdiff", "--no-lookup")


@pytest.fixture(scope="package")
def shipped_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model with weights in blocks, and the default drafter with its truncated vocabulary."""
    folder = tmp_path_factory.mktemp("shipped")
    yield from _serve(folder / "log", *EXACT, "--profile", str(jagged_profile(folder)))


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
def adapter_folders(small_target: SmallTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """LoRA adapters that change every answer: for all linear layers, for some with another rank, and one for later."""
    root, model, some = tmp_path_factory.mktemp("adapters"), small_target.model, ("q_proj", "v_proj", "down_proj")
    return {
        "sql": write_adapter(root / "sql", model, 1, rank=4, strength=1.0),
        "poems": write_adapter(
            root / "poems", model, 2, rank=7, modules=some, strength=1.0, use_rslora=True, lora_alpha=5.3
        ),
        "later": write_adapter(root / "later", model, 3, rank=2, strength=1.0),
    }


@pytest.fixture(scope="package")
def adapted(small_target: SmallTarget, adapter_folders: dict[str, Path]) -> dict[str, PreTrainedModel]:
    """The model under its own name, and with each adapter merged into it."""
    merges = {name: merged(small_target.folder, folder) for name, folder in adapter_folders.items()}
    return {bundled_model.NAME: small_target.model} | merges


def add_keys(file: Path, *names: str, **limits: Any) -> dict[str, str]:
    """Add API keys; returns their secrets."""
    secrets = {name: key_file.new() for name in names}
    for name, secret in secrets.items():
        key_file.add(file, key_file.Key(name=name, digest=key_file.digest(secret.encode()), **limits))
    return secrets


@pytest.fixture
def drafter(request: pytest.FixtureRequest) -> str:
    """Name of the learning drafter: a test's parameter, else DSpark."""
    return getattr(request, "param", "dspark")


@pytest.fixture
def start_hurried(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers that look for drafters and save texts often, one after another; `change`: another change."""
    started: list[Server] = []

    def start(*flags: str, change: str = "") -> Server:
        started.append(ForkedServer(tmp_path / f"log-{len(started)}", *flags, **changed("hurries", change)))
        return started[-1].wait_until_ready()

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def start_learning(
    start_hurried: Callable[..., Server], tmp_path: Path, small_target: SmallTarget, drafter: str
) -> Callable[..., Server]:
    """Starts learning servers of the small target; they learn in `tmp_path`/learned."""
    learning = ("--learn", "--learn-folder", str(tmp_path / "learned"))
    return partial(start_hurried, *SHARING, *small_target.flags(drafter), *ALL, *learning)


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
