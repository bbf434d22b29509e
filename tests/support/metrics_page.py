import re
from collections.abc import Callable
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from running import HTTP

TABLES = (
    (Path(__file__).parents[2] / "server" / "README.md")
    .read_text()
    .partition("\n## Metrics\n")[2]
    .partition("\n## ")[0]
)


def documented(heading: str) -> dict[str, tuple[str, str]]:
    """Kind and labels of our metrics by name, from the table with this heading."""
    table = TABLES.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    metrics = {}
    for names, kind in re.findall(r"^\| (`outrider_.*?) \| (\w+) \|", table, re.MULTILINE):
        for name, labels in re.findall(r"`(outrider_\w+)(?:\{([^}]*)\})?`", names):
            metrics[name] = (kind, labels)
    return metrics


class MetricsPage:
    """A snapshot of the page. families: by name, for counters without `_total`."""

    def __init__(self, url: str) -> None:
        """url: of the server, without `/metrics`."""
        answer = HTTP.get(f"{url}/metrics", timeout=20)
        assert answer.status_code == 200, answer.text
        self.families: dict[str, Metric] = {
            family.name: family for family in text_string_to_metric_families(answer.text)
        }

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples with this name and these labels; 0 if there is none."""
        samples = (sample for family in self.families.values() for sample in family.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def metric(url: str, name: str, **labels: str) -> float:
    """One current value of the page."""
    return MetricsPage(url).value(name, **labels)


def until_retracted(url: str, ask: Callable[[], None]) -> None:
    """Send more requests than the cache has room for until one is retracted; on a busy machine that takes several
    tries."""
    name = "sglang:num_retracted_requests_total"
    before = metric(url, name)
    for _ in range(5):
        ask()
        if metric(url, name) > before:
            return
    raise AssertionError("no request was retracted")
