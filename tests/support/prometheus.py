"""A real Prometheus with deploy/prometheus' scrape config."""

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from running import HTTP, free_port

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
SCRAPE_SECONDS = 1


class Prometheus:
    """Started in `folder`; scrapes `target`, HOST:PORT."""

    def __init__(self, folder: Path, target: str) -> None:
        if shutil.which("prometheus") is None:
            pytest.skip("needs prometheus (Debian: apt-get install prometheus)")
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = dict.fromkeys(config["global"], f"{SCRAPE_SECONDS}s")
        config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
        (scraped,) = config["scrape_configs"][0]["static_configs"]
        scraped["targets"] = [target]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query; fails where Prometheus refuses it."""
        answer = HTTP.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        return answer["data"]["result"]

    def wait_for_scrapes(self, count: int) -> None:
        asked = 'count_over_time(up{job="outrider"}[10m]) and up{job="outrider"} == 1'
        begun, deadline = None, time.monotonic() + 30 + 2 * count * SCRAPE_SECONDS
        while time.monotonic() < deadline:
            try:
                series = self.ask(asked)
            except (httpx.TransportError, ValueError):
                series = []
            if series:
                now = float(series[0]["value"][1])
                begun = now if begun is None else begun
                if now - begun >= count:
                    return
            time.sleep(0.2)
        pytest.fail(f"Prometheus does not scrape:\n{self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
