"""Dashboards and alert rules: fresh, about metrics that exist, and right by promtool's own tests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "deploy" / "observability"
KNOWN = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
HISTOGRAMS = set(re.findall(r"^\| `(\w+)` \| histogram", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))


def queries() -> dict[str, str]:
    found = {}
    for path in sorted((HERE / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                found[f"{path.stem}: {panel['title']}: {target['legendFormat']}"] = target["expr"]
    for file in ("alerts.yml", "vllm_names.yml"):
        for group in yaml.safe_load((HERE / "prometheus" / file).read_text())["groups"]:
            for rule in group["rules"]:
                found[rule.get("alert") or rule["record"]] = rule["expr"]
    return found


@pytest.mark.parametrize(("name", "query"), queries().items(), ids=queries())
def test_a_query_asks_for_metrics_that_exist(name: str, query: str) -> None:
    for metric in re.findall(r"\bsapwood_\w+", query):
        histogram = re.sub("_(bucket|sum|count)$", "", metric)
        assert metric in KNOWN - HISTOGRAMS or (histogram != metric and histogram in HISTOGRAMS), f"{name}: {metric}"


def test_each_service_has_a_dashboard_and_all_are_fresh() -> None:
    found = {path.stem for path in (HERE / "grafana" / "dashboards").glob("*.json")}
    assert found == {"overview", "router", "cache", "pictures"}
    command = [sys.executable, str(HERE / "write_dashboards.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_pods_are_scaled_by_metrics_that_exist() -> None:
    asked = re.findall(r"metric: \{name: (\w+)\}", (ROOT / "deploy/k8s/base/autoscaling.yaml").read_text())
    assert len(asked) == 3
    assert set(asked) <= KNOWN


def test_every_alert_is_explained() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    for group in yaml.safe_load((HERE / "prometheus" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert f"`{rule['alert']}`" in page


def test_promtool_finds_the_rules_right() -> None:
    promtool = shutil.which("promtool") or shutil.which("promtool", path=Path(sys.executable).parent)
    if promtool is None:
        pytest.skip("promtool is not here: tests/system.sh could not fetch it")
    for verb, *files in (
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
        ("check", "rules", "vllm_names.yml"),
        ("test", "rules", "vllm_names_test.yml"),
        ("check", "config", "prometheus.yml"),
    ):
        command = [promtool, verb, *files]
        done = subprocess.run(command, cwd=HERE / "prometheus", capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
