"""Prometheus' rules and alerts, by promtool's own checks and unit tests."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
ALERTS = [alert for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for alert in group["rules"]]
TESTS = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]


def promtool(*arguments: str) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool (Debian: apt-get install prometheus)")
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_config_and_rules_are_right() -> None:
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_every_alert_is_shown_firing_and_not_firing() -> None:
    checks = [check for test in TESTS for check in test["promql_expr_test"] if "ALERTS" in check["expr"]]
    seen = [set(re.findall(r'alertname="(\w+)"', str(check.get("exp_samples")))) for check in checks]
    for alert in ALERTS:
        assert any(alert["alert"] in firing for firing in seen)
        assert any(alert["alert"] not in firing for firing in seen)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alerts_name_the_fault_and_the_remedy(alert: dict) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert "$labels.instance" in alert["annotations"]["summary"]
    assert len(alert["annotations"]["description"]) > 100
