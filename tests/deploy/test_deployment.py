"""`deploy/` fits this version. `make check-deploy` runs schemas and linters, and the images."""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.server.cli import serve
from outrider.server.http.keys.auth import OPEN_PATHS
from outrider.server.settings.flags import served_settings_of
from outrider.server.settings.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
OVERLAYS = sorted(path.parent for path in (DEPLOY / "kubernetes/overlays").glob("*/kustomization.yaml"))
ANY_ADDRESS = "0.0.0.0"


def settings(command: list[str]) -> Settings:
    assert command.pop(0) == "serve"
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    return served_settings_of(parser.parse_args(command))


def instructions(dockerfile: Path) -> dict[str, str]:
    """The last instruction of each kind, continued lines joined."""
    text = dockerfile.read_text().replace("\\\n", " ")
    return dict(re.findall(r"^([A-Z]+) (.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_images_pin_their_parts_by_hash(dockerfile: Path) -> None:
    text = dockerfile.read_text().replace("\\\n", " ")
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert base in stages or re.search(r"@sha256:[0-9a-f]{64}$", base), base
    for lock in re.findall(r"--requirement (\S+)", text):
        unhashed = lock == "deploy/requirements/torch-cpu.txt"
        assert unhashed or re.search(rf"--require-hashes --requirement {re.escape(lock)}", text), lock


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_images_serve_and_have_a_health_check(dockerfile: Path) -> None:
    last = instructions(dockerfile)
    server = settings(json.loads(last["CMD"]))
    assert server.host == ANY_ADDRESS
    assert last["EXPOSE"] == str(server.port)
    user, group = last["USER"].split(":")
    assert user.isdigit()  # Kubernetes cannot tell that a name is not root
    assert user == group != "0"
    (path,) = re.findall(rf"http://127.0.0.1:{server.port}(/\w+)", last["HEALTHCHECK"])
    assert path in OPEN_PATHS


def test_compose_starts_existing_services() -> None:
    compose = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    service = compose["services"]["server"]
    server = settings(list(service["command"]))
    assert server.host == ANY_ADDRESS
    assert server.metrics_host == ANY_ADDRESS  # Prometheus is another container
    assert int(service["stop_grace_period"].removesuffix("s")) > server.drain_seconds
    scraped = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"] == [{"targets": [f"server:{server.metrics_port}"]}]
    for each in compose["services"].values():
        for mount in (volume.split(":")[0] for volume in each["volumes"]):
            assert mount in compose["volumes"] or (DEPLOY / "compose" / mount).exists(), mount
    build = service["build"]
    assert (DEPLOY / "compose" / build["context"] / build["dockerfile"]).is_file()
    for each in compose["services"].values():  # reached from this machine alone, and bounded
        assert all(port.startswith("127.0.0.1:") for port in each["ports"])
        assert each["read_only"]
        assert each["cap_drop"] == ["ALL"]
        assert each.keys() >= {"mem_limit", "pids_limit"}
        assert "build" in each or re.search(r"@sha256:[0-9a-f]{64}$", each["image"])


@pytest.fixture(scope="module", params=OVERLAYS, ids=lambda path: path.name)
def objects(request: pytest.FixtureRequest) -> dict[str, Any]:
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(request.param)]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build", str(request.param)]
    else:
        pytest.skip("needs kubectl or kustomize")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {found["kind"]: found for found in yaml.safe_load_all(done.stdout)}


def test_a_pod_has_time_to_start_and_to_drain(objects: dict[str, Any]) -> None:
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    server = settings(list(container["args"]))
    assert server.host == ANY_ADDRESS
    assert server.metrics_host == ANY_ADDRESS
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": server.port, "metrics": server.metrics_port}
    annotations = objects["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(server.metrics_port)
    for probe, path in (("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
        assert path in OPEN_PATHS
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + server.drain_seconds


def test_a_pod_may_do_little(objects: dict[str, Any]) -> None:
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    security = pod["securityContext"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == instructions(DOCKERFILES[0])["USER"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["resources"]["limits"].keys() >= {"cpu", "memory", "ephemeral-storage"}
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounted.keys() >= {"/tmp", "/var/cache/outrider"}
    keys = settings(list(container["args"])).api_keys
    assert keys is not None
    (secret,) = (volume["secret"] for volume in pod["volumes"] if volume["name"] == mounted[str(keys.parent)])
    assert secret["secretName"] == "outrider"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_everything_is_about_the_same_pods(objects: dict[str, Any]) -> None:
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)


def test_the_autoscaler_asks_for_metrics_that_are_made(objects: dict[str, Any]) -> None:
    if "HorizontalPodAutoscaler" not in objects:
        assert objects["Deployment"]["spec"]["replicas"] >= 1
        return
    scaler = objects["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == objects["Deployment"]["metadata"]["name"]
    assert "replicas" not in objects["Deployment"]["spec"]
    adapter = yaml.safe_load((DEPLOY / "kubernetes/components/autoscaling/metrics.yaml").read_text())
    made = {rule["name"]["as"] for rule in adapter["rules"]["custom"]}
    assert {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]} == made


def test_the_unit_starts_a_server_and_lets_it_drain(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd/outrider.service").read_text()
    values = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    program, *command = shlex.split(values["ExecStart"])
    assert int(values["TimeoutStopSec"]) > settings(command).drain_seconds
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "outrider.service"
    unit.write_text(text.replace(program, shutil.which("true") or ""))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], env=os.environ | {"SYSTEMD_LOG_LEVEL": "warning"}, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
