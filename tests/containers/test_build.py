"""The shipped images and files before anything runs: what they hold, and that every variant of them is sound."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE_IMAGE = "python:3.12.12-slim-bookworm"
SECRETS = (r"-----BEGIN [A-Z ]*PRIVATE KEY", r"(^|[^A-Za-z0-9])(sk-|ghp_|AKIA)[A-Za-z0-9]{16,}")
"""What secrets look like."""

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def image_sizes(engine) -> dict[str, float]:
    """MB of each image of the default profile on top of the base image."""

    def size(image: str) -> float:
        return float(json.loads(engine.docker("image", "inspect", image))[0]["Size"]) / 1e6

    return {name: size(f"sapwood-{name}") - size(BASE_IMAGE) for name in ("router", "tokenizer", "model", "worker")}


def test_images_hold_what_they_need_and_no_more(engine, image_sizes) -> None:
    print("\n[containers] MB on top of the base image:", {name: round(size) for name, size in image_sizes.items()})
    assert image_sizes["router"] < 100  # python:3.12-slim has 125; aiohttp, which asks HTTP backends, is 9 of it
    assert image_sizes["tokenizer"] < 230  # numpy is 71 of it, Pillow, which decodes pictures, 22
    assert image_sizes["worker"] < 1400
    facts = "import importlib.util as u, os; print(u.find_spec('torch'), u.find_spec('pip'), os.getuid())"
    for name in ("router", "tokenizer"):
        image = f"sapwood-{name}"
        found = engine.docker("run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", facts)
        assert found.split() == ["None", "None", "10001"], name


def test_images_hold_no_secrets_and_say_what_they_are(engine, image_sizes) -> None:
    patterns = " ".join(f"-e '{pattern}'" for pattern in SECRETS)
    look = f"grep -rIlE {patterns} /opt /etc /root /home || true"
    files = "ls -A /run/secrets /root/.cache /root/.netrc /etc/pip.conf /root/.config 2>/dev/null; true"
    for name in image_sizes:
        image = f"sapwood-{name}"
        shell = ("run", "--rm", "--network", "none", "--user", "0", "--entrypoint", "sh", image, "-c")
        assert engine.docker(*shell, look) == "", name
        assert engine.docker(*shell, files) == "", name
        config = json.loads(engine.docker("image", "inspect", image))[0]["Config"]
        assert not re.search(r"(KEY|TOKEN|PASSWORD|SECRET)=", " ".join(config["Env"])), name
        assert config["User"] == "10001:10001", name
        said = {key.removeprefix("org.opencontainers.image.") for key in config["Labels"]}
        assert said >= {"title", "description", "licenses", "version", "revision", "created", "source", "base.name"}, (
            name
        )
        assert config["Labels"]["org.opencontainers.image.revision"] == engine.variables["SAPWOOD_REVISION"], name
        assert "CERTIFICATE" not in engine.docker("history", "--no-trunc", image), name


def test_the_gpu_images_own_stages_build(engine) -> None:
    # Debian stands in for NVIDIA's image, which no index here has: what is built is all but CUDA's packages.
    arguments = ["VARIANT=cuda", f"CUDA_IMAGE={BASE_IMAGE}", f"PYTHON_IMAGE={BASE_IMAGE}"]
    flags = [flag for argument in arguments for flag in ("--build-arg", argument)]
    engine.docker("build", "-f", "docker/worker.Dockerfile", "--target", "requirements", *flags, "-t", "gpu-stage", ".")

    def sh(command: str) -> str:
        # As compose runs it: what is compiled on first use must be loaded from the volume.
        hard = ("--read-only", "--tmpfs", "/tmp", "--tmpfs", "/kernels:exec", "--cap-drop", "ALL", "--network", "none")
        return engine.docker("run", "--rm", *hard, "--entrypoint", "bash", "gpu-stage", "-euc", command)

    assert "flashinfer-python" in sh("cat /requirements.txt")
    assert "/usr/bin/ninja" in sh("which ninja")
    # What Triton does for each kernel: a launcher in C, compiled with Python.h, is loaded from its cache.
    write = "printf '#include <Python.h>\\nint seven(void) { return 7; }' > /tmp/launcher.c; mkdir -p $TRITON_CACHE_DIR"
    compile_it = "gcc -shared -fPIC $(python3-config --includes) /tmp/launcher.c -o $TRITON_CACHE_DIR/launcher.so"
    load = """python3 -c "import ctypes; print(ctypes.CDLL('$TRITON_CACHE_DIR/launcher.so').seven())" """
    assert sh(f"{write}; {compile_it}; {load}").strip() == "7"


def test_every_profile_and_override_is_valid(engine) -> None:
    everything = {"COMPOSE_PROFILES": "gpu,mooncake,observability"}
    shown = json.loads(engine.compose("config", "--format", "json", **everything))["services"]
    assert {
        "router",
        "worker-0",
        "worker-1",
        "worker-gpu-0",
        "mooncake-master",
        "grafana",
        "collector",
        "jaeger",
    } <= shown.keys()
    for override, count in (("gpu", 1), ("gpus", 2)):
        files = ("-f", "compose.yaml", "-f", f"docker/compose.{override}.yaml")
        shown = json.loads(engine.compose(*files, "--profile", "gpu", "config", "--format", "json"))["services"]
        names = [f"worker-gpu-{number}" for number in range(count)]
        assert {name for name in shown if name.startswith("worker")} == set(names)
        assert set(shown["router"]["depends_on"]) == {"tokenizer", *names}
        asked = json.loads(shown["router"]["environment"]["SAPWOOD_ROUTER_WORKERS"])
        assert asked == [f"{name}:50061" for name in names]
        for number, name in enumerate(names):
            (device,) = shown[name]["deploy"]["resources"]["reservations"]["devices"]
            assert device["device_ids"] == [str(number)]
            assert {volume["target"] for volume in shown[name]["volumes"]} == {"/models", "/kv", "/kernels"}
            assert set(shown[name]["depends_on"]) == {"model"}
    split = ("-f", "compose.yaml", "-f", "docker/compose.gpu.yaml", "-f", "docker/compose.tensor-parallel.yaml")
    shown = json.loads(engine.compose(*split, "--profile", "gpu", "config", "--format", "json", SAPWOOD_GPUS="4"))
    worker = shown["services"]["worker-gpu-0"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert int(device["count"]) == int(worker["environment"]["SAPWOOD_WORKER_TENSOR_PARALLEL"]) == 4
    assert "device_ids" not in device


def test_promtool_finds_the_rules_right(engine) -> None:
    # What tests/deploy skips where Prometheus is not installed; here it is.
    for arguments in (
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
        ("check", "config", "prometheus.yml"),
    ):
        folder = ROOT / "deploy/observability/prometheus"
        done = subprocess.run(
            ["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
