"""deploy/k8s and docker/ pass the checkers that there are for them, and hold together among themselves."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import pytest
import yaml

from sapwood_common.settings.config import parse_config
from sapwood_router.config import RouterConfig
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ("cpu-demo", "disaggregated", "gpu", "multi-node")
COMPONENTS = tuple(sorted(path.parent.name for path in (ROOT / "deploy/k8s/components").glob("*/kustomization.yaml")))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CONFIGS = {"router": RouterConfig, "tokenizer": TokenizerConfig, "worker": WorkerConfig}


def tool(name: str) -> str:
    """A command that came with a package of this environment."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found is not None, f"{name} is missing: make lint installs it"
    return found


@cache
def manifests(overlay: str) -> list[dict[str, Any]]:
    return build(ROOT / "deploy/k8s/overlays" / overlay)


def build(folder: Path) -> list[dict[str, Any]]:
    command = [tool("kubectl"), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def workloads(overlay: str) -> dict[str, dict[str, Any]]:
    return of_kind(manifests(overlay), "Deployment", "StatefulSet", "Job")


def of_kind(items: list[dict[str, Any]], *kinds: str) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in items if item["kind"] in kinds}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The gpu overlay with every component there is."""
    folder = tmp_path_factory.mktemp("everything").resolve()

    def path(name: str) -> str:
        return os.path.relpath(ROOT / "deploy/k8s" / name, folder)

    text = {
        "kind": "Kustomization",
        "resources": [path("overlays/gpu")],
        "namespace": "sapwood",
        "components": [path(f"components/{name}") for name in COMPONENTS],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return build(folder)


# What is valid at both ends is between them, too, unless a version takes something away and the next brings it back.
@pytest.mark.parametrize(
    "version", ["1.33", *(pytest.param(f"1.{number}", marks=pytest.mark.slow) for number in (34, 35, 36)), "1.37"]
)
def test_every_manifest_is_valid(version: str, everything: list[dict[str, Any]]) -> None:
    from kubernetes_validate import validate  # takes seconds

    overlays = [manifests(overlay) for overlay in OVERLAYS]
    assert all({"router", "tokenizer", "worker"} <= set(workloads(overlay)) for overlay in OVERLAYS)
    different = {json.dumps(item, sort_keys=True): item for items in (*overlays, everything) for item in items}
    for item in different.values():
        if not item["apiVersion"].startswith("monitoring.coreos.com"):  # an operator's own kinds have no schema here
            validate(item, version, strict=True)


def test_all_components_go_together(everything: list[dict[str, Any]]) -> None:
    kinds = {item["kind"] for item in everything}
    split = of_kind(everything, "ConfigMap")["worker"]["data"]["SAPWOOD_WORKER_TENSOR_PARALLEL"]
    [container] = of_kind(everything, "StatefulSet")["worker"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(split) == 2
    assert {"PodMonitor", "PrometheusRule", "RoleBinding"} <= kinds
    for name, config in CONFIGS.items():
        prefix = str(config.model_config["env_prefix"])
        known = {f"{prefix}{field}".upper() for field in config.model_fields}
        assert set(of_kind(everything, "ConfigMap")[name]["data"]) <= known, "a variable that nobody reads"
    restricted(of_kind(everything, "Deployment", "StatefulSet", "Job"), tokens={"router", "scaler"})
    policies = of_kind(everything, "NetworkPolicy")
    assert all("from" in rule for policy in policies.values() for rule in policy["spec"].get("ingress", ()))
    rules = of_kind(everything, "PrometheusRule")["sapwood"]["spec"]
    assert rules == yaml.safe_load((ROOT / "deploy/observability/prometheus/alerts.yml").read_text())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_restricted(overlay: str) -> None:
    restricted(workloads(overlay), tokens={"router"} if overlay == "multi-node" else set())


def restricted(found: dict[str, dict[str, Any]], tokens: set[str]) -> None:
    """Checks pods; those named in ``tokens`` may ask the API server."""
    for name, workload in found.items():
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", name
        assert pod["automountServiceAccountToken"] is (name in tokens), name
        for container in pod["containers"]:
            # A cluster that was given the images need not fetch them: no `latest`, which Kubernetes always does.
            assert container["imagePullPolicy"] == "IfNotPresent", name
            assert re.fullmatch(rf"sapwood-\w+:{re.escape(VERSION)}(-cuda)?", container["image"]), name
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
def test_how_many_there_are_is_said_in_one_place(overlay: str) -> None:
    scaled = {
        item["spec"]["scaleTargetRef"]["name"]: item["spec"]["minReplicas"]
        for item in manifests(overlay)
        if item["kind"] == "HorizontalPodAutoscaler"
    }
    for name in CONFIGS:  # replicas next to an autoscaler would be set again with each `kubectl apply`
        replicas = workloads(overlay)[name]["spec"].get("replicas")
        assert (replicas is None) is (name in scaled), name
        assert (replicas or scaled[name]) >= 2, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_the_router_is_reachable_from_outside(overlay: str) -> None:
    policies = {
        item["metadata"]["name"]: item["spec"] for item in manifests(overlay) if item["kind"] == "NetworkPolicy"
    }
    assert policies["deny-all"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    opened = {name for name, spec in policies.items() if any("from" not in rule for rule in spec.get("ingress", ()))}
    assert opened == {"router"}


def test_workers_of_each_role_reach_the_pages_of_all_as_roles_change() -> None:
    items = manifests("disaggregated")
    settings, pods = of_kind(items, "ConfigMap"), of_kind(items, "StatefulSet")
    for name, role in (("worker", "prefill"), ("worker-decode", "decode")):
        pod = pods[name]["spec"]["template"]
        assert pods[name]["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert pod["metadata"]["labels"]["sapwood.dev/role"] == role
        (container,) = pod["spec"]["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": name}}]
        assert settings[name]["data"]["SAPWOOD_WORKER_ROLE"] == role
        assert pods[name]["spec"]["serviceName"] == "worker"
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert str(ports["handoff"]) == settings[name]["data"]["SAPWOOD_WORKER_KV_TRANSFER_PORT"]
    policies = {name: policy["spec"] for name, policy in of_kind(items, "NetworkPolicy").items()}
    (let_in,) = policies["handoff"]["ingress"]
    (let_out,) = policies["handoff-reads"]["egress"]
    assert let_in["from"] == [{"podSelector": policies["handoff-reads"]["podSelector"]}]
    assert let_out["to"] == [{"podSelector": policies["handoff"]["podSelector"]}]
    assert let_out["ports"][0]["port"] == ports["handoff"]
    who = {"matchExpressions": [{"key": "sapwood.dev/role", "operator": "Exists"}]}
    assert policies["handoff"]["podSelector"] == policies["handoff-reads"]["podSelector"] == who


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_operators_methods_and_metrics_are_not_where_the_api_is(overlay: str) -> None:
    items = manifests(overlay)
    settings = of_kind(items, "ConfigMap")["router"]["data"]
    assert "SAPWOOD_ROUTER_ADMIN_HOST" not in settings, "127.0.0.1 unless told otherwise"
    private = {int(settings["SAPWOOD_ROUTER_ADMIN_PORT"]), int(settings["SAPWOOD_ROUTER_METRICS_PORT"])}
    public = {port["port"] for item in of_kind(items, "Service").values() for port in item["spec"]["ports"]}
    assert not private & public
    (rule,) = of_kind(items, "NetworkPolicy")["router"]["spec"]["ingress"]
    assert {port["port"] for port in rule["ports"]} == {"http", "grpc"}
    (container,) = workloads(overlay)["router"]["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert str(ports["metrics"]) == settings["SAPWOOD_ROUTER_METRICS_PORT"]


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


def test_the_scaler_asks_a_router_and_may_only_scale_the_workers(everything: list[dict[str, Any]]) -> None:
    from sapwood.cli.main import build_parser

    workloads = of_kind(everything, "Deployment", "StatefulSet")
    [container] = workloads["scaler"]["spec"]["template"]["spec"]["containers"]
    asked = build_parser().parse_args(["scaler", *container["args"]])
    service, _, port = asked.address.partition(".sapwood.svc:")
    [opened] = of_kind(everything, "Service")[service]["spec"]["ports"]
    [router] = workloads["router"]["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in router["ports"]}
    settings = of_kind(everything, "ConfigMap")["router"]["data"]
    assert int(port) == opened["port"] == ports[opened["targetPort"]] == int(settings["SAPWOOD_ROUTER_ADMIN_PORT"])
    assert asked.kubernetes == [("both", "sapwood/statefulset/worker")] and "worker" in workloads
    [rule] = of_kind(everything, "Role")["scaler"]["rules"]
    assert rule == {
        "apiGroups": ["apps"],
        "resources": ["statefulsets/scale"],
        "resourceNames": ["worker"],
        "verbs": ["get", "patch"],
    }
    assert "worker" not in of_kind(everything, "HorizontalPodAutoscaler"), "two would scale it"
    ingress = of_kind(everything, "NetworkPolicy")["router"]["spec"]["ingress"]
    admin = [each for each in ingress if {"protocol": "TCP", "port": "admin"} in each["ports"]]
    assert [each["from"] for each in admin] == [
        [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "scaler"}}}]
    ]


POOL: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {
            "type": "object",
            "additionalProperties": False,
            "required": ["matchLabels"],
            "properties": {"matchLabels": {"type": "object", "minProperties": 1}},
        },
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": {"type": "object", "additionalProperties": False, "properties": {"number": {"type": "integer"}}},
        },
        "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
        "endpointPickerRef": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name"],
            "properties": {
                "group": {"const": ""},
                "kind": {"const": "Service"},
                "name": {"type": "string"},
                "port": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}
"""The specification of an InferencePool of version v1, as far as manifests use it: no package has its schema."""


def test_the_gateways_objects_name_each_other_and_its_pods_are_restricted() -> None:
    import jsonschema
    from kubernetes_validate import validate

    items = manifests("gateway")
    theirs = [item for item in items if item["apiVersion"].split("/")[0].endswith("networking.k8s.io")]
    for item in items:
        if item not in theirs or item["kind"] == "NetworkPolicy":
            validate(item, "1.37", strict=True)
    [pool] = of_kind(items, "InferencePool").values()
    [route] = of_kind(items, "HTTPRoute").values()
    [gateway] = of_kind(items, "Gateway").values()
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    jsonschema.validate(pool["spec"], POOL)
    [rule] = route["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool["metadata"]["name"]}
    ]
    assert route["spec"]["parentRefs"] == [{"name": gateway["metadata"]["name"]}]
    reference = pool["spec"]["endpointPickerRef"]
    services = of_kind(items, "Service")
    [port] = services[reference["name"]]["spec"]["ports"]
    assert port["port"] == reference["port"]["number"]
    assert services["servers"]["spec"]["selector"] == pool["spec"]["selector"]["matchLabels"]
    assert services["servers"]["spec"]["ports"][0]["port"] == pool["spec"]["targetPorts"][0]["number"]
    restricted(workloads("gateway"), tokens=set())
    settings = of_kind(items, "ConfigMap")["endpoint-picker"]["data"]
    known = {f"SAPWOOD_ROUTER_{field}".upper() for field in RouterConfig.model_fields}
    assert settings.keys() <= known, "a variable that nobody reads"


def test_dockerfiles_pass_hadolint() -> None:
    files = sorted(map(str, (ROOT / "docker").glob("*.Dockerfile")))
    assert len(files) == 5
    done = subprocess.run([tool("hadolint"), *files], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_dockerfiles_pin_their_bases_and_know_the_version() -> None:
    for path in (ROOT / "docker").glob("*.Dockerfile"):
        text = path.read_text()
        bases = re.findall(r"^ARG \w+_IMAGE=(.*)$", text, re.MULTILINE)
        assert bases, path.name
        assert all(re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base) for base in bases), path.name
        assert f"ARG VERSION={VERSION}\n" in text, path.name
        assert bases[0] in (ROOT / "compose.yaml").read_text(), path.name
        assert bases[0] in (ROOT / ".env.example").read_text(), path.name


def test_images_of_others_are_named_by_digest_wherever_they_are_named() -> None:
    pinned = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")
    found = set()
    for path in (ROOT / "compose.yaml", *(ROOT / "docker").glob("*.yaml"), *(ROOT / "deploy").rglob("*.y*ml")):
        for image in re.findall(r"\bimage: *(\S+)", path.read_text()):
            image = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", image)
            if not re.match(r"sapwood-\w+", image):
                assert pinned.fullmatch(image), f"{path.name}: {image}"
                found.add(image.partition(":")[0])
    assert found == {"prom/prometheus", "grafana/grafana", "otel/opentelemetry-collector", "jaegertracing/jaeger"}
    stages = r"^FROM (?:--\S+ )?(\S+)(?: AS (\S+))?$"
    for path in (ROOT / "docker").glob("*.Dockerfile"):
        made = {"base-${VARIANT}"}
        for base, stage in re.findall(stages, path.read_text(), re.MULTILINE):
            assert base in made or re.fullmatch(r"\$\{\w+_IMAGE\}", base), f"{path.name}: {base}"
            made.add(stage)


def test_each_image_has_a_bill_of_materials_of_what_is_installed_in_it() -> None:
    for path in (ROOT / "docker").glob("*.Dockerfile"):
        text = path.read_text()
        assert re.search(r"/build/sbom\.py \"?sapwood-[\w$-]+\"? \"\$VERSION\" > \S+/sbom\.cdx\.json", text), path.name
        installs = [found.start() for found in re.finditer(r"pip (?:un)?install", text)]
        assert max(installs) < text.rindex("/build/sbom.py "), f"{path.name}: of what is installed in the end"


def test_a_bill_of_materials_names_every_package_once_with_version_licence_and_needs() -> None:
    script = [sys.executable, "-P", str(ROOT / "docker/sbom.py"), "sapwood-test", "1.2.3"]
    written = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert subprocess.run(script, capture_output=True, text=True, check=True).stdout == written, (
        "it is the same each time"
    )
    bill = json.loads(written)
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    top = bill["metadata"]["component"]
    assert (top["type"], top["name"], top["version"]) == ("container", "sapwood-test", "1.2.3")
    parts = {part["bom-ref"]: part for part in bill["components"]}
    assert len(parts) == len(bill["components"])
    installed = {re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each for each in distributions()}
    names = {ref.removeprefix("pkg:pypi/").partition("@")[0] for ref in parts}
    assert names == set(installed)
    grpcio = parts[f"pkg:pypi/grpcio@{version('grpcio')}"]
    assert (grpcio["type"], grpcio["name"], grpcio["version"]) == ("library", "grpcio", version("grpcio"))
    assert grpcio["licenses"]
    needs = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    assert needs.keys() == {top["bom-ref"], *parts}
    assert set(needs[top["bom-ref"]]) == set(parts)
    assert {need for each in needs.values() for need in each} <= set(parts)
    assert f"pkg:pypi/protobuf@{version('protobuf')}" in needs[f"pkg:pypi/sapwood@{version('sapwood')}"]


def test_the_compose_file_hardens_every_service_and_reads_known_variables() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    known = {f"{c.model_config['env_prefix']}{f}".upper() for c in CONFIGS.values() for f in c.model_fields}
    for name, service in compose["services"].items():
        assert "mem_limit" in service, name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if str(service["image"]).startswith("sapwood-"):
            assert set(service.get("environment", ())) <= known | {"HF_TOKEN", "HF_HUB_OFFLINE"}, name
        else:
            assert ":" in service["image"], "a pinned tag"
            assert not service["image"].endswith(":latest"), name
        for variable, value in service.get("environment", {}).items():
            if variable.endswith("_DRAIN_TIMEOUT"):
                seconds = [
                    float(re.sub(r".*:-([\d.]+)s?\}", r"\1", text)) for text in (value, service["stop_grace_period"])
                ]
                assert seconds[0] + 10 <= seconds[1], name
    router = compose["services"]["router"]
    published = {str(port).rpartition(":")[2] for port in router["ports"]}
    assert published == {"8000", "50051"}
    assert str(router["environment"]["SAPWOOD_ROUTER_ADMIN_PORT"]) not in published


def test_compose_has_a_pair_of_workers_that_share_their_memory_between_two_tiers() -> None:
    pair = yaml.safe_load((ROOT / "docker/compose.disagg.yaml").read_text())["services"]
    roles = [pair[name]["environment"]["SAPWOOD_WORKER_ROLE"] for name in ("worker-0", "worker-1")]
    assert roles == ["prefill", "decode"]
    known = {f"{c.model_config['env_prefix']}{f}".upper() for c in CONFIGS.values() for f in c.model_fields}
    for service in pair.values():
        assert set(service["environment"]) <= known


def test_the_example_settings_are_those_that_compose_reads() -> None:
    shown: dict[str, list[str]] = {}
    for name, value in re.findall(r"^#([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE):
        shown.setdefault(name, []).append(value)
    texts = [(ROOT / "compose.yaml").read_text(), *(path.read_text() for path in (ROOT / "docker").glob("*.yaml"))]
    passed_on = r"^ +(SAPWOOD_[A-Z_]+):(?: *#.*)?$"
    read = [re.findall(r"\$\{([A-Z_]+)", text) + re.findall(passed_on, text, re.MULTILINE) for text in texts]
    assert set(shown) == {name for names in read for name in names}
    for name, default in re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", texts[0]):
        assert not default or shown[name] == [default], name


@pytest.mark.parametrize(
    ("variant", "wheel"),
    [("cpu", "torch-2.13.0+cpu-x.whl"), ("cpu", "torch-2.13.0-x.whl"), ("cuda", "torch-2.13.0+cu130-x.whl")],
)
def test_an_image_takes_only_a_torch_of_its_own_variant(variant: str, wheel: str, tmp_path: Path) -> None:
    found = re.search(r'case "\$VARIANT" in \\\n.*?esac;', (ROOT / "docker/worker.Dockerfile").read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / wheel).touch()
    shell = f'{found[0].replace("/wheels", str(tmp_path))} echo "$wheel"'
    for asked, expected in ((variant, str(tmp_path / wheel)), ({"cpu": "cuda", "cuda": "cpu"}[variant], "")):
        command = ["bash", "-euo", "pipefail", "-c", shell]
        environment = {**os.environ, "VARIANT": asked, "TORCH_INDEX": "index"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == expected


def test_compose_prometheus_knows_every_worker_and_a_router_every_one_it_runs_with() -> None:
    files = {path.name: path.read_text() for path in (ROOT / "docker").glob("compose.*.yaml")}
    text = (ROOT / "compose.yaml").read_text() + "".join(files.values())
    workers = set(re.findall(r"^  (worker-[\w-]+):$", text, re.MULTILINE))
    config = yaml.safe_load((ROOT / "deploy/observability/prometheus/prometheus.yml").read_text())
    (job,) = [job for job in config["scrape_configs"] if job["job_name"] == "worker"]
    assert set(job["dns_sd_configs"][0]["names"]) == workers
    for name, expected in (("compose.gpu.yaml", 1), ("compose.gpus.yaml", 2)):
        asked = re.findall(r'"(worker-gpu-\d):50061"', files[name])
        assert len(asked) == expected
        assert asked == re.findall(r"(worker-gpu-\d): \{condition: service_healthy\}", files[name])


def test_what_images_are_built_with_is_pinned() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "docker/constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for extras in (
        ["router", "otel", "kubernetes"],
        ["tokenizer", "otel"],
        ["gpu", "otel", "mooncake", "nixl"],
        ["cli", "models"],
        ["s3"],
    ):
        command = [sys.executable, str(ROOT / "docker/requirements.py"), str(ROOT / "pyproject.toml"), *extras]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        names = {requirement.split(">")[0].split("=")[0].split("[")[0].lower() for requirement in listed}
        assert names - {"torch", "triton"} <= pinned, f"docker/constraints.txt misses {names - pinned}"


def test_workers_over_hosts_are_groups_of_pods_of_which_the_first_serves() -> None:
    from kubernetes_validate import validate

    items = manifests("hosts")
    [group] = of_kind(items, "LeaderWorkerSet").values()  # an operator's own kind: its pods are what can be checked
    for item in items:
        if item is not group:
            validate(item, "1.37", strict=True)
    assert "worker" not in workloads("hosts")
    [scaler] = (
        item for item in items if item["kind"] == "HorizontalPodAutoscaler" and item["metadata"]["name"] == "worker"
    )
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": group["apiVersion"],
        "kind": group["kind"],
        "name": group["metadata"]["name"],
    }
    template = group["spec"]["leaderWorkerTemplate"]
    pods = [template["leaderTemplate"], template["workerTemplate"]]
    restricted({str(rank): {"spec": {"template": pod}} for rank, pod in enumerate(pods)}, tokens=set())
    settings = of_kind(items, "ConfigMap")["worker"]["data"]
    for rank, pod in enumerate(pods):
        metadata = {"name": "pod"} | pod["metadata"]
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}, "1.37", strict=True)
        [container] = pod["spec"]["containers"]
        given = {"$(LWS_LEADER_ADDRESS)": "worker-0.worker.sapwood", "$(LWS_WORKER_INDEX)": str(rank)}
        flags = [re.sub(r"\$\(\w+\)", lambda found, given=given: given[found[0]], flag) for flag in container["args"]]  # type: ignore[misc]
        for name, value in settings.items():
            flags.append(f"--{name.removeprefix('SAPWOOD_WORKER_').lower().replace('_', '-')}={value}")
        config = parse_config(WorkerConfig, "worker", "", flags)
        assert config.meeting_place == ("worker-0.worker.sapwood", 7411)
        assert str(config.rendezvous_key) == "/group/key"
        assert {"name": "group", "secret": {"secretName": "worker-group", "defaultMode": 0o440}} in pod["spec"][
            "volumes"
        ]
        assert {"name": "group", "mountPath": "/group", "readOnly": True} in container["volumeMounts"]
        assert (config.nnodes, config.node_rank) == (template["size"], rank)
        assert config.ranks == config.nnodes * container["resources"]["limits"]["nvidia.com/gpu"]
        assert (
            ("readinessProbe" in container) == ("livenessProbe" in container) == ("ports" in container) == (rank == 0)
        )
    names = [pod["metadata"]["labels"]["app.kubernetes.io/name"] for pod in pods]
    assert of_kind(items, "Service")["worker"]["spec"]["selector"] == {"app.kubernetes.io/name": names[0]}
    policy = of_kind(items, "NetworkPolicy")["ranks"]["spec"]
    assert policy["podSelector"]["matchExpressions"][0]["values"] == names
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    assert policy["egress"] == [{"to": [{"podSelector": policy["podSelector"]}]}]
    drain = float(settings["SAPWOOD_WORKER_DRAIN_TIMEOUT"])
    assert pods[0]["spec"]["terminationGracePeriodSeconds"] > drain + 5
