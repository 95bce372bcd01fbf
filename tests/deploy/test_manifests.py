"""deploy/k8s and docker/ pass the checkers that there are for them, and hold together among themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sapwood_router.config import RouterConfig
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ("cpu-demo", "gpu", "multi-node")
CONFIGS = {"router": RouterConfig, "tokenizer": TokenizerConfig, "worker": WorkerConfig}


def tool(name: str) -> str:
    """A command that came with a package of this environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found is not None, f"{name} is missing: make lint installs it"
    return found


@cache
def manifests(overlay: str) -> list[dict[str, Any]]:
    command = [tool("kubectl"), "kustomize", str(ROOT / "deploy/k8s/overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def workloads(overlay: str) -> dict[str, dict[str, Any]]:
    return {
        item["metadata"]["name"]: item
        for item in manifests(overlay)
        if item["kind"] in ("Deployment", "StatefulSet", "Job")
    }


@pytest.mark.parametrize("version", ["1.33", "1.34", "1.35", "1.36", "1.37"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_is_valid(overlay: str, version: str) -> None:
    items = manifests(overlay)
    assert {"router", "tokenizer", "worker"} <= set(workloads(overlay))
    for item in items:
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_restricted(overlay: str) -> None:
    for name, workload in workloads(overlay).items():
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", name
        assert pod["automountServiceAccountToken"] is (overlay == "multi-node" and name == "router"), name
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"], name
            assert not context["allowPrivilegeEscalation"], name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert "memory" in container["resources"]["limits"], name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_grace_period_covers_the_drain(overlay: str) -> None:
    settings = {item["metadata"]["name"]: item["data"] for item in manifests(overlay) if item["kind"] == "ConfigMap"}
    for name, config in CONFIGS.items():
        pod = workloads(overlay)[name]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        drain = float(settings[name][f"SAPWOOD_{name.upper()}_DRAIN_TIMEOUT"])
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] > pause + drain, name
        prefix = str(config.model_config["env_prefix"])
        known = {f"{prefix}{field}".upper() for field in config.model_fields}
        assert set(settings[name]) <= known, "a variable that nobody reads"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_router_is_reachable_from_outside(overlay: str) -> None:
    policies = {
        item["metadata"]["name"]: item["spec"] for item in manifests(overlay) if item["kind"] == "NetworkPolicy"
    }
    assert policies["deny-all"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    opened = {name for name, spec in policies.items() if any("from" not in rule for rule in spec.get("ingress", ()))}
    assert opened == {"router"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_find_their_pods_and_ports_exist(overlay: str) -> None:
    pods = {
        workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]: workload["spec"]["template"][
            "spec"
        ]
        for workload in workloads(overlay).values()
    }
    for item in manifests(overlay):
        if item["kind"] == "Service":
            pod = pods[item["spec"]["selector"]["app.kubernetes.io/name"]]
            ports = {port["name"] for port in pod["containers"][0]["ports"]}
            assert {port["targetPort"] for port in item["spec"]["ports"]} <= ports
        if item["kind"] == "PodDisruptionBudget":
            assert item["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] in pods
        if item["kind"] == "HorizontalPodAutoscaler":
            assert item["spec"]["scaleTargetRef"]["name"] in workloads(overlay)


def test_dockerfiles_pass_hadolint() -> None:
    files = sorted(map(str, (ROOT / "docker").glob("*.Dockerfile")))
    assert len(files) == 5
    done = subprocess.run([tool("hadolint"), *files], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_compose_file_hardens_every_service_and_reads_known_variables() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    known = {f"{c.model_config['env_prefix']}{f}".upper() for c in CONFIGS.values() for f in c.model_fields}
    for name, service in compose["services"].items():
        assert "mem_limit" in service, name
        if str(service["image"]).startswith("sapwood-"):
            assert service["read_only"] is True, name
            assert service["cap_drop"] == ["ALL"], name
            assert set(service.get("environment", ())) <= known, name
        else:
            assert ":" in service["image"], "a pinned tag"
            assert not service["image"].endswith(":latest"), name


def test_what_images_are_built_with_is_pinned() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "docker/constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for extras in (["router", "otel"], ["tokenizer", "otel"], ["worker", "otel", "mooncake", "nixl"], ["cli"]):
        command = [sys.executable, str(ROOT / "docker/requirements.py"), str(ROOT / "pyproject.toml"), *extras]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        names = {requirement.split(">")[0].split("=")[0].split("[")[0].lower() for requirement in listed}
        assert names - {"torch"} <= pinned, f"docker/constraints.txt misses {names - pinned}"
