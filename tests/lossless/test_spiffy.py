"""Spiffy on the server: the text of base decoding, which `test_diffusion.py` tests, in fewer forwards.

With --exhaustive for blocks of 4 and 32, both policies, tied and untied, with and without shared prefixes.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from diffusion_servers import ALL, Served, check_spiffy, serve
from metrics_page import MetricsPage, documented
from running import HTTP, run_forked
from tiny_diffusion import TinyDiffusion

from outrider.server.http.routes.live import MIN_INTERVAL_SECONDS

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards" / "speculation.json"


@pytest.fixture(scope="module")
def static_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("static"), TinyDiffusion(tied=False), *ALL, threshold=None)


def test_the_text_equals_base_decoding(static_server: Served) -> None:
    check_spiffy(static_server)


def test_its_metrics_are_documented(static_server: Served) -> None:
    families = MetricsPage(static_server.server.url).families
    said = documented("metric of a block-diffusion model")
    assert len(said) == 7
    assert {name: kind for name, (kind, _) in said.items()} == {name: families[name].type for name in said}


def test_the_dashboard_and_the_page_show_existing_metrics(static_server: Served) -> None:
    url, (prompt,) = static_server.server.url, static_server.prompts([9])
    before = HTTP.get(f"{url}/outrider/live", timeout=30).json(), MetricsPage(url)
    static_server.ask(prompt, 9)
    time.sleep(MIN_INTERVAL_SECONDS)
    now = HTTP.get(f"{url}/outrider/live", timeout=30).json(), MetricsPage(url)
    for name in ("steps", "timed_steps", "tokens"):
        assert now[0][name] > before[0][name]
    counted = "sglang:realtime_tokens_total"
    assert now[1].value(counted, mode="decode") == before[1].value(counted, mode="decode") + 9
    samples = {sample.name for family in now[1].families.values() for sample in family.samples}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    (row,) = (place for place, panel in enumerate(panels) if panel["title"] == "Block-diffusion models")
    asked = "".join(target["expr"] for panel in panels[row + 1 :] for target in panel["targets"])
    assert set(re.findall(r"outrider_\w+", asked)) <= samples


def test_planning_by_a_tuned_profile_keeps_the_text(static_server: Served) -> None:
    served = static_server
    (prompt,) = served.prompts([14])
    expected = served.ask(prompt, 40)
    words = ["tune", "--server", served.server.url, "--quick", "--rounds", "1", "--max-requests", "1"]
    done = run_forked(*words)
    assert done.returncode == 0, done.stderr
    assert "steps ahead greedy" in done.stdout
    folder = Path(done.stdout.split("saved to ")[1].split(" on the server")[0])
    try:
        points = json.loads((folder / "profile.json").read_text())["points"]
        assert {point["requests"] for point in points} == {1}
        assert len({point["tokens"] for point in points}) >= 3
        graphs = json.loads((folder / "draft-graphs.json").read_text())
        assert [graph["fingerprint"]["temperature"] for graph in graphs] == ["greedy", "sampled"]
        assert all(graph["fingerprint"]["policy"] == "static 1" and graph["nodes"] for graph in graphs)
        assert served.ask(prompt, 40) == expected
    finally:
        shutil.rmtree(folder)
