"""Counts of rounds."""

from prometheus_client import CollectorRegistry

from outrider.server.plugin.diffusion.metrics import DiffusionMetrics


def test_rounds_are_counted_once_and_shown_when_flushed() -> None:
    registry = CollectorRegistry()
    metrics = DiffusionMetrics(registry)
    metrics.observe(open_blocks=3, drafted=4, planned=[0, 3], accepted=[0, 1, 2], joined=1, tokens=8)
    metrics.observe(open_blocks=0, drafted=0, planned=[], accepted=[], joined=0, tokens=0)  # a prompt alone
    for _ in range(2):
        metrics.flush()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"outrider_{name}", labels)

    assert (value("diffusion_forwards_total"), value("diffusion_request_forwards_total")) == (1, 3)
    assert (value("drafted_states_total"), value("joined_commits_total"), value("diffusion_tokens_total")) == (4, 1, 8)
    assert [value("accepted_states_total", depth=depth) for depth in "123"] == [2, 1, 0]
    assert (value("planned_states_count"), value("planned_states_sum")) == (2, 3)
    assert [value("planned_states_bucket", le=le) for le in ("0.0", "2.0", "3.0")] == [1, 1, 2]
    totals = {"forwards": 1, "request_forwards": 3, "tokens": 8, "drafted": 4, "accepted": 3, "joined": 1, "planned": 2}
    assert metrics.totals == totals
