"""What keyword arguments make of a cluster; nothing is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sapwood
from sapwood.embedded.keywords import read_keywords
from sapwood.errors import InvalidArgumentError


def test_a_setting_goes_to_each_service_that_has_it_and_with_a_name_before_it_to_one() -> None:
    options = {
        "max_running": 7,
        "log_level": "error",
        "router_log_level": "debug",
        "router_policy": "least_load",
        "model": None,
    }
    services = read_keywords(options, 2, {"max_running": 9, "worker_silence": 30.0})
    assert (services.worker.config.max_running, services.router.config.worker_silence.seconds) == (7, 30.0)
    assert (services.tokenizer.config.log_level, services.router.config.log_level) == ("error", "debug")
    assert services.router.config.policy == "least_load" and services.worker.config.threads is not None
    assert read_keywords({"threads": 3}, 2, {}).worker.config.threads == 3
    seeded = read_keywords({"random_seed": 5}, 1, {})
    assert (seeded.router.config.random_seed, seeded.worker.config.random_seed) == (5, 5)
    shadows = read_keywords({"shadow_policies": ("random", "round_robin")}, 1, {}).router
    assert shadows.command_line({}) == ["--shadow-policies", "random", "round_robin"]


@pytest.mark.parametrize(
    ("options", "field", "problem"),
    [
        ({"max_runing": 7}, "max_runing", "no option 'max_runing'; max_running?"),
        ({"tls_cert": "x"}, "tls_cert", "router_tls_cert or tokenizer_tls_cert or worker_tls_cert"),
        ({"policy": "fcfs"}, "policy", "router_policy or worker_policy"),
        ({"max_running": "many"}, "worker_max_running", "got 'many'"),
        ({"worker_queue_size": 1}, "worker_queue_size", "no option"),
        ({"storage": "file:///x"}, "worker_storage", "has no effect"),
        ({"log_level": "loud"}, "log_level", "log_level / SAPWOOD_ROUTER_LOG_LEVEL"),
        ({"revision": 5}, "revision", "revision / SAPWOOD_TOKENIZER_REVISION"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        sapwood.Engine("demo", **options)
    assert caught.value.field == field
    assert problem in caught.value.message


def test_what_is_no_models_name_is_named_as_the_model() -> None:
    given: Any = 5
    with pytest.raises(InvalidArgumentError, match="valid string") as caught:
        sapwood.Engine(given)
    assert caught.value.field == "model"


def test_a_model_that_is_not_there_is_named_when_it_is_wanted(tmp_path: Path) -> None:
    for made in (sapwood.Engine(str(tmp_path)), sapwood.Server(str(tmp_path))):
        with pytest.raises(InvalidArgumentError, match="holds no config") as caught:
            made.start()
        assert caught.value.field == "model"
        made.close()
    with pytest.raises(InvalidArgumentError, match="workers is 0"):
        sapwood.Engine("demo", workers=0)


def test_importing_the_package_imports_nothing_of_others() -> None:
    seen = "import sys; before = set(sys.modules); import sapwood; new = set(sys.modules) - before"
    shown = "print(sorted(n for n in new if n.partition('.')[0] not in sys.stdlib_module_names))"
    done = subprocess.run([sys.executable, "-c", f"{seen}; {shown}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['sapwood']"
    assert not hasattr(sapwood, "Nothing")
