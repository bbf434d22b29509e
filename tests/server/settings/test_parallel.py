"""Ranks and nodes, read from SGLang's flags before SGLang is imported."""

import socket
from types import SimpleNamespace

import pytest
from refusals import refuses

from outrider.server.machine import topology
from outrider.server.model import target
from outrider.server.model.target import Model
from outrider.server.processes.process import scheduler_index
from outrider.server.settings import memory
from outrider.server.settings.parallel import Parallel, interface_of
from outrider.server.settings.settings import Settings

MEETING = ("--dist-init-addr", "10.0.0.1:25000")
FOUR = ("--tp-size", "4", "--nnodes", "2", "--node-rank", "1", *MEETING)


def test_known_flags_are_read_and_the_rest_kept() -> None:
    quiet = ("--log-level", "error", "--constrained-json-disable-any-whitespace")
    parallel = Parallel.of((*FOUR, *quiet, "--page-size", "16"))
    assert (parallel.tp_size, parallel.nnodes, parallel.node_rank, parallel.address) == (4, 2, 1, ("10.0.0.1", 25000))
    assert parallel.ranks_here == 2
    assert not parallel.leads
    assert parallel.step_flags == ("--page-size", "16", "--tp-size", "4", "--nnodes", "2")  # what changes a step
    alone = Parallel.of(())
    assert alone.leads
    assert alone.ranks_here == 1
    assert alone.step_flags == ()


@pytest.mark.parametrize("flags", [FOUR, ("--tensor-parallel-size=2", "--nnodes=2", "--nccl-init-addr=h:1")])
def test_sglang_reads_the_same(flags: tuple[str, ...]) -> None:
    from outrider.server.plugin import activate

    activate()
    from outrider.server.processes import sglang_args

    theirs, ours = sglang_args.parse_flags(flags), Parallel.of(flags)
    assert theirs == {name: getattr(ours, name) for name in theirs}
    assert len(theirs) >= 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp-size", "0"), "--tp-size is a number from 1, not 0"),
        (("--tp-size", "two"), "among the flags for SGLang: argument --tp-size"),
        (("--nnodes", "0"), "--nnodes is a number from 1, not 0"),
        (("--node-rank", "1"), "--node-rank is a number from 0 to --nnodes - 1 = 0, not 1"),
        (("--tp-size", "3", "--nnodes", "2", *MEETING), "--tp-size 3 ranks cannot be spread evenly over --nnodes 2"),
        (("--tp-size", "2", "--nnodes", "2"), "--nnodes 2 needs --dist-init-addr HOST:PORT"),
        (("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", "10.0.0.1"), "--dist-init-addr is HOST:PORT, like"),
        (("--disaggregation-mode", "both"), "among the flags for SGLang: argument --disaggregation-mode: invalid"),
        *(
            (("--disaggregation-mode", role, "--disaggregation-transfer-backend", backend),
             f"--disaggregation-mode {role} goes with .*, not {backend}: .* that two servers fit together")
            for role, backend in (("decode", "fake"), ("prefill", "nixl"))
        ),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_at_once(flags: tuple[str, ...], message: str) -> None:
    refuses(f"^{message}", Settings, device="cpu", sglang_flags=flags)


def test_cores_are_divided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = tuple(topology.Core(0, (cpu,)) for cpu in range(2))
    monkeypatch.setattr(topology, "here", lambda: topology.Topology(cores, None))
    two = Settings(device="cpu", sglang_flags=("--tp-size", "2"))
    assert (two.schedulers, two.resolved_threads) == (2, 1)
    three, both = {"sglang_flags": ("--tp-size", "3")}, {"engines": 2, "sglang_flags": ("--tp-size", "2")}
    refuses("--tp-size 3 puts 3 ranks on this machine, which has 2 cores for them", Settings, device="cpu", **three)
    refuses("--engines and --tp-size both divide its cores", Settings, device="cpu", **both)
    refuses("--engines share one machine", Settings, device="cpu", engines=2, sglang_flags=FOUR)


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    smollm2 = Model("SmolLM2", "path", {"num_attention_heads": 9, "num_key_value_heads": 3}, None)
    for ranks in (1, 3, 9):
        target.check_heads(smollm2, ranks)
    refuses(r"9 attention heads and 3 .* --tp-size 2 .* possible are 1, 3, 9", target.check_heads, smollm2, 2)
    target.check_heads(Model("odd", "path", {"text_config": {}}, None), 2)


def test_each_node_has_its_part_of_weights_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target.find(None)
    monkeypatch.setattr(memory.hardware, "available_memory", lambda: 64 << 30)
    seen: list[int] = []
    monkeypatch.setattr(target, "weight_bytes", lambda model, size, in_blocks: seen.append(in_blocks) or 8 << 30)
    spread = Settings(device="cpu", dtype="float32", sglang_flags=("--tp-size", "3", "--nnodes", "3", *MEETING))
    memory.plan(spread, model)
    assert seen == [False]  # ranks have parts of layers
    monkeypatch.setattr(memory.hardware, "available_memory", lambda: 6 << 30)
    memory.plan(spread, model)
    refuses("too little memory", memory.plan, Settings(device="cpu", dtype="float32"), model)


def test_schedulers_are_placed_one_after_the_other() -> None:
    def args(tp_rank: int, engine: int | None) -> tuple[object, ...]:
        return (None, None, 0, tp_rank, 0, engine, None)

    assert [scheduler_index(args(rank, None)) for rank in (0, 1)] == [0, 1]
    second_node = [scheduler_index(args(rank, None)) % 2 for rank in (2, 3)]  # with two of four ranks
    assert second_node == [0, 1]
    assert [scheduler_index(args(0, engine)) for engine in (0, 1)] == [0, 1]


def test_the_interface_that_leads_to_the_first_node() -> None:
    interfaces = {
        "lo": [SimpleNamespace(address="127.0.0.1")],
        "eth0": [SimpleNamespace(address="fe80::1"), SimpleNamespace(address="10.0.0.7")],
    }
    assert interface_of("10.0.0.7", interfaces) == "eth0"
    assert interface_of("10.0.0.8", interfaces) is None
    loopback = Parallel.of(("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", "127.0.0.1:25000")).interface()
    assert loopback in {name for _, name in socket.if_nameindex()}
    nowhere = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", "no-such-host.invalid:25000")
    assert Parallel.of(nowhere).interface() is None
