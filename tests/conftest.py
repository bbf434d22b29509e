"""Fixtures of all tests."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from outrider.server.machine.threads import SPINS

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in `outrider` (server/cli/main.py), before numpy reads it
os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))  # as in a server, before torch reads it

import hypothesis
import openai
import pytest
import torch
from running import ONE_THREAD, EngineWatch, Server, changed
from small_target import SmallTarget

from outrider.kernels.cpu import native
from outrider.profiles import store
from outrider.server.machine import hardware
from outrider.server.model import target
from outrider.server.settings import checkpoints, profile_lookup
from outrider.server.settings.settings import Settings

gc.disable()  # until all tests are collected: their imports create millions of lasting objects
# Other tests and servers use the cores too, and threads that share an operation spin for each other. Tests of kernels
# use all cores (tests/kernels/conftest.py).
torch.set_num_threads(1)

STARTING = ("server", "served")
"""Fixtures that start a server, as do all with a name that ends with "_server"."""
QUICK = "not server and not slow"
"""The -m of `make check`."""

hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of most tests, with a KV cache and context of 4096 tokens."""
    folder = tmp_path_factory.mktemp("server")
    flags = ("--max-total-tokens", "4096", "--max-choices", "16", "--log-format", "json", "--log-requests", "summary")
    flags += ONE_THREAD  # `exact_server` uses all cores, as users' servers
    one_call = changed("one-call") if native.available() and not hardware.has_gpu() else {}
    with Server(folder / "log", *flags, *planned_by(folder), **one_call) as started:
        yield started


def planned_by(folder: Path) -> tuple[str, ...]:
    """Flags for the default server's planner with a shipped profile's costs."""
    model, settings = target.find(None), Settings(activations="float", threads=1 if ONE_THREAD else None)
    here = profile_lookup.fingerprint(checkpoints.with_drafter_path(settings, model), model)
    shipped = store.read(store.SHIPPED / "smollm2-135m-instruct-dspark-zen5-2")
    saved = store.save(replace(shipped, name="served", fingerprint=here), folder, None)
    return ("--profile", str(saved.folder))


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="session")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> SmallTarget:
    """A small random Llama with the embedded model's tokenizer, and drafters."""
    return SmallTarget.write(tmp_path_factory.mktemp("small"))


@pytest.fixture(params=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with the compiled kernels, once without."""
    if request.param == "torch":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip("no compiled kernels here")


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers, and xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test `server` if its fixtures start a server; a test that starts an engine itself must set the marker.

    A worker of `make test` runs whole groups: tests/lossless that need special servers, all others that need servers,
    and files. The first two run first, so that none of their servers starts twice; files with slow tests come before
    the rest.
    """
    serving = {item for item in items if server_fixtures(item) or item.get_closest_marker("server")}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    for item in items:
        lossless = item.nodeid.startswith("tests/lossless/") and "server" not in server_fixtures(item)
        group = "lossless" if lossless else "servers"
        item.add_marker(pytest.mark.xdist_group(group if item in serving else item.nodeid.partition("::")[0]))
        if item in serving:
            item.add_marker("server")
    items.sort(key=lambda item: 0 if item in serving else 1 if item.path in slow else 2)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # above the closing line
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report.longrepr[2] for report in terminalreporter.getreports("skipped")]
    for reason, count in Counter(reason.removeprefix("Skipped: ") for reason in skipped).most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}", yellow=True)


def server_fixtures(item: pytest.Item) -> list[str]:
    return [name for name in getattr(item, "fixturenames", ()) if name in STARTING or name.endswith("_server")]


@pytest.fixture(scope="session")
def engine_watch(request: pytest.FixtureRequest) -> Iterator[EngineWatch | None]:
    if request.config.option.markexpr != QUICK:
        yield None
        return
    with EngineWatch() as watch:
        yield watch


@pytest.fixture(autouse=True)
def no_engine_without_the_marker(engine_watch: EngineWatch | None) -> Iterator[None]:
    """A test that starts an engine in any way fails in `make check`."""
    yield
    if engine_watch is not None and engine_watch.seen:
        engine_watch.seen = False
        pytest.fail("this test starts an engine: give it @pytest.mark.server")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--overlap"):
        os.environ.update(changed("overlap"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="all prompts, seeds and variants, which takes long on a CPU"
    )
    parser.addoption("--overlap", action="store_true", help="servers overlap scheduling and forward, as on a GPU")
    parser.addoption("--fuzz", type=int, metavar="N", help="malformed requests in tests/server/http/test_fuzz.py")
