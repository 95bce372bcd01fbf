"""What `sapwood up` makes of its command line; tests/operations/test_up.py starts what it says."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import get_origin

import gguf
import pytest

from sapwood.cli import up
from sapwood.cli.errors import CliError
from sapwood.cli.local.checks import claimed_ports
from sapwood.cli.main import build_parser, main
from sapwood.cli.services import Services
from sapwood_common.settings.config import build_parser as service_parser
from sapwood_common.settings.config import command_line, given_settings, load_config


def read(*flags: str) -> Services:
    return up._services(build_parser("up").parse_args(["up", *flags]))


@pytest.mark.parametrize("name", ["router", "tokenizer", "worker"])
def test_every_flag_of_every_service_reaches_it_as_it_was_given(name: str) -> None:
    cls = type(vars(read())[name].config)
    words: dict[str, list[str]] = {}
    for field, info in cls.model_fields.items():
        flag = f"--{name}-{field.replace('_', '-')}"
        if info.annotation is bool:
            words[field] = [flag.replace(f"--{name}", f"--no-{name}", 1)]
        elif (name, field) not in (("tokenizer", "port"), ("worker", "port")):  # they are flags of `sapwood up` itself
            words[field] = [flag, *(["a:1", "b"] if get_origin(info.annotation) is tuple else [f"{field}="])]
    asked = build_parser("up").parse_args(["up", *(word for each in words.values() for word in each)])
    given = given_settings(cls, asked, f"{name}-")
    assert given.keys() == words.keys()
    assert given_settings(cls, service_parser(cls, name, "").parse_args(command_line(given))) == given


def test_a_services_flag_wins_over_ups_own_and_that_over_the_services_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAPWOOD_ROUTER_POLICY", "random")
    monkeypatch.setenv("SAPWOOD_WORKER_THREADS", "5")
    assert read().router.config.policy == "random"
    assert "policy" not in read().router.given, "its own variable reaches it as it is"
    assert read("--policy", "least_load").router.given["policy"] == "least_load"
    monkeypatch.setenv("SAPWOOD_UP_POLICY", "prefix_hash")
    assert read().router.config.policy == "prefix_hash"
    assert read("--policy", "least_load", "--router-policy", "round_robin").router.config.policy == "round_robin"
    assert read().worker.config.threads == 5
    assert read("--threads", "3").worker.config.threads == 3
    assert read("--tensor-parallel", "2").worker.config.tensor_parallel == 2
    seeded = read("--random-seed", "0", "--worker-random-seed", "3")
    assert (seeded.router.config.random_seed, seeded.worker.config.random_seed) == (0, 3)


def test_what_concerns_several_services_is_said_once(tmp_path: Path) -> None:
    services = read(
        "--log-level", "error", "--drain-timeout", "9", "--worker-drain-timeout", "11", "--model", str(tmp_path)
    )
    for service in (services.router, services.tokenizer, services.worker):
        assert service.config.log_level == "error"
    assert services.drain_timeout == 11
    assert services.tokenizer.config.model == services.worker.config.model == str(tmp_path)


@pytest.mark.parametrize("verb", ["up", "serve"])
def test_the_model_is_named_by_position_or_by_flag(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAPWOOD_UP_MODEL", "other/model")
    words = [verb, "some/model", "--revision", "v1", "--served-model-name", "mine", "--worker-load-format", "dummy"]
    services = up._services(build_parser(verb).parse_args(words))
    for config in (services.tokenizer.config, services.worker.config):
        assert (config.model, config.revision, config.served_model_name) == ("some/model", "v1", "mine")
    assert main([verb, "some/model", "--model", "another/model"]) == 2
    assert "MODEL (some/model) and --model (another/model) are both given" in capsys.readouterr().err


def test_a_revision_of_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(tmp_path), "--revision", "v1"]) == 2
    assert "--tokenizer-revision / SAPWOOD_TOKENIZER_REVISION: has no effect unless --" in capsys.readouterr().err


def read_alone(folder: Path, *flags: str) -> Services:
    return up._services(build_parser("up").parse_args(["up", "--no-router", *flags]), folder)


def test_without_a_router_all_but_http_listens_on_unix_sockets(tmp_path: Path) -> None:
    services = read_alone(tmp_path, "--host", "0.0.0.0", "--port", "8123")
    assert (services.workers, services.front) == (1, "http")
    for service in (services.router, services.tokenizer, services.worker):
        ports = {name: number for name, number in service.ports().items() if number}
        hosts = {name: service.host_of(name) for name in ports}
        assert hosts.pop("http_port", None) == ("0.0.0.0" if service is services.router else None)
        assert set(hosts.values()) == {f"unix:{tmp_path}/s"}
    assert services.router.config.http_port == 8123
    assert read_alone(tmp_path).router.config.http_port == 8000
    assert read_alone(tmp_path, "--ports", "auto").router.config.http_port == 0
    assert read_alone(tmp_path, "--http-port", "9").router.config.http_port == 9


@pytest.mark.parametrize(
    "flags",
    [("--workers", "2"), ("--policy", "random"), ("--worker-port", "1"), ("--port", "1", "--http-port", "2")],
)
def test_without_a_router_what_means_nothing_is_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with pytest.raises(CliError) as caught:
        read_alone(tmp_path, *flags)
    assert flags[0] in str(caught.value) and "--no-router" in str(caught.value)


def test_a_taken_port_is_named_by_a_flag_also_without_a_router(
    taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--no-router", "--port", str(taken_port)]) == 1
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{taken_port}" in error and "choose another with --http-port" in error


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has abstract Unix sockets")
def test_a_port_that_another_up_has_claimed_is_named_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    first = first_of_free_ports()
    ports = [f"--{name}={first + at}" for at, name in enumerate(("tokenizer-port", "http-port", "port", "worker-port"))]
    claim = f"\0sapwood-up-{OWN_HOST}-{first + 1}"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(claim)
        assert main(["up", "nothere/nothing", *AT_OWN_HOST, *ports]) == 1
    assert capsys.readouterr().err == (
        f"sapwood: cannot listen on {OWN_HOST}:{first + 1}: another `sapwood up` has taken it; "
        "choose another with --http-port, or free ones with --ports auto\n"
    )
    with socket.socket(socket.AF_UNIX) as next_one:
        next_one.bind(claim)  # a claim ends with its process, or with the command


OWN_HOST = "127.61.7.31"
"""An address of this machine at which nothing else listens."""
AT_OWN_HOST = [f"--{name}={OWN_HOST}" for name in ("host", "tokenizer-host", "worker-host")]


def first_of_free_ports() -> int:
    with socket.socket() as held:
        held.bind((OWN_HOST, 0))
        return int(held.getsockname()[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has abstract Unix sockets")
def test_of_clusters_that_start_at_once_one_gets_all_ports() -> None:
    first = first_of_free_ports()
    names = ("port", "http-port", "tokenizer-port", "worker-port", "worker-metrics-port", "tokenizer-metrics-port")
    flags = [[f"--{name}={first + (at + turn) % len(names)}" for at, name in enumerate(names)] for turn in range(6)]
    clusters = [read("--workers", "1", *AT_OWN_HOST, *each) for each in flags]
    for _ in range(20):
        start, tried, got = threading.Barrier(len(clusters)), threading.Barrier(len(clusters)), []

        def claim(services: Services, start=start, tried=tried, got=got) -> None:
            start.wait()
            with contextlib.suppress(CliError), claimed_ports(services):
                got.append(services)
                tried.wait()
                return
            tried.wait()

        threads = [threading.Thread(target=claim, args=(services,)) for services in clusters]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1


def test_an_address_that_is_not_this_machines_is_named_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--ports", "auto", "--host", "203.0.113.9"]) == 1  # an address of documentation (RFC 5737)
    error = capsys.readouterr().err
    assert "203.0.113.9 is no address of this machine; choose another with --host\n" in error


def test_each_further_worker_has_the_next_ports() -> None:
    services = read("--worker-port", "6000", "--worker-kv-events-port", "7000", "--worker-metrics-port", "0")
    assert services.worker.ports(2) == {"port": 6002, "kv_events_port": 7002, "metrics_port": 0, "kv_transfer_port": 0}


def test_roles_are_those_of_each_worker_and_say_how_many_there_are() -> None:
    services = read("--roles", "prefill,decode,decode")
    assert (services.roles, services.workers) == (("prefill", "decode", "decode"), 3)
    for wrong in (["--workers", "2"], ["--worker-role", "decode"]):
        with pytest.raises(CliError, match="--roles"):
            read("--roles", "prefill,decode,decode", *wrong)
    with pytest.raises(SystemExit):
        read("--roles", "prefill,cook")


def test_ports_auto_leaves_those_that_are_named() -> None:
    services = read("--ports", "auto", "--http-port", "8001")
    assert (services.router.config.port, services.router.config.http_port) == (0, 8001)
    assert (services.tokenizer.config.port, services.worker.config.port) == (0, 0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--worker-max-running", "0"], "--worker-max-running / SAPWOOD_WORKER_MAX_RUNNING: "),
        (
            ["--router-queue-size", "5,wait=1,wait=2", "--router-queue-wait", "3"],
            "--router-queue-size: wait is given twice",
        ),
        (
            ["--router-worker-silence", "heartbeat_ms=x"],
            "--router-worker-silence heartbeat_ms / SAPWOOD_ROUTER_WORKER_SILENCE: ",
        ),
        (["--router-worker-silence", "0.1"], "--router-worker-silence / SAPWOOD_ROUTER_WORKER_SILENCE: "),
        (["--tokenizer-config", "/nowhere.yaml"], "--tokenizer-config: cannot read /nowhere.yaml"),
        (
            ["--ports", "auto", "--router-api-keys", "/nowhere"],
            "--router-api-keys: cannot read /nowhere: No such file or directory\n",
        ),
        (
            ["--ports", "auto", "--worker-tls-cert", "/nowhere", "--worker-tls-key", "/nowhere"],
            "--worker-tls-cert: cannot read /nowhere: No such file or directory\n",
        ),
    ],
)
def test_a_wrong_value_is_refused_before_anything_starts(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--max-running", "--worker-max-running"),
        ("--worker.max-running", "--worker-max-running"),
        ("--worker-max_running", "--worker-max-running"),
        ("--worker-max-runing=3", "--worker-max-running"),
        ("--max-model-len=4096", "--worker-context-length"),
        ("-tp", "--tensor-parallel"),
        ("--worker", "--workers"),
        ("--trace-endpoint", "--router-trace-endpoint or --tokenizer-trace-endpoint or --worker-trace-endpoint"),
    ],
)
def test_an_unknown_flag_is_refused_and_what_may_be_meant_is_named(
    flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["up", flag])
    assert stopped.value.code == 2
    assert f"unrecognized arguments: {flag}; did you mean {meant}?" in capsys.readouterr().err


def test_a_second_model_is_refused_without_a_guess_at_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["up", "demo", "m"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith("unrecognized arguments: m\n")


def test_help_shows_the_flags_by_service(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    shown = capsys.readouterr().out
    own, _, services = shown.partition("\nrouter:\n")
    router, _, rest = services.partition("\ntokenizer:\n")
    tokenizer, _, workers = rest.partition("\nworkers:\n")
    assert "--ports" in own
    for group, name in ((router, "router"), (tokenizer, "tokenizer"), (workers, "worker")):
        flags = [line.split()[0] for line in group.splitlines() if line.startswith("  --")]
        assert len(flags) > 20
        assert all(flag.startswith(f"--{name}-") for flag in flags)


def test_what_a_service_says_of_its_flags_is_said_of_ups() -> None:
    worker = read().worker
    assert worker.reworded("--storage needs a second tier: --host-cache") == (
        "--worker-storage needs a second tier: --worker-host-cache"
    )
    assert worker.reworded("turn off with --no-prefix-cache, not --prefix-caches") == (
        "turn off with --no-worker-prefix-cache, not --prefix-caches"
    )


def test_the_command_needs_the_services_packages_for_up_alone() -> None:
    """As after `pip install sapwood` without extras: grpcio and protobuf."""
    without = ("pydantic", "pydantic_settings", "httptools", "tokenizers", "torch", "yaml")
    program = (
        "import sys, importlib.util as u\n"
        f"without = {without}\n"
        "sys.modules.update(dict.fromkeys(without))\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in without else find(name, *a)\n"
        "from sapwood.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(main(['up', '--workers', '1']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "start tokenizer, workers and router here" in done.stdout
    assert done.stderr == "sapwood: `sapwood up` needs the services: pip install 'sapwood[router,tokenizer,worker]'\n"


def test_an_own_flag_is_checked_as_it_is_read() -> None:
    with pytest.raises(CliError, match=r"--router-policy / SAPWOOD_ROUTER_POLICY: .*cache_aware"):
        read("--policy", "best")


def test_settings_that_may_hold_credentials_stand_on_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = ["url=http://alice:geheim@10.0.0.7/v1,model=m,name=a", "url=http://10.0.0.8/v1,model=m,name=b"]
    services = read(
        "--router-backends", *backends, "--model", "s3://key:geheim@bucket/m", "--policy", "random", "--threads", "2"
    )
    for service in (services.router, services.tokenizer, services.worker):
        shown, hidden = service.command_line({"port": 7}), service.environment({"port": 7})
        assert "geheim" not in " ".join(shown)
        for name, value in hidden.items():
            monkeypatch.setenv(name, value)
        cls = type(service.config)
        again = load_config(cls, given_settings(cls, service_parser(cls, service.name, "").parse_args(shown)))
        assert again == service.config.model_copy(update={"port": 7})
    assert "--policy=random" in services.router.command_line({})


def test_every_architecture_of_a_family_is_among_the_names_found_without_importing_them() -> None:
    from sapwood_worker.model.families.names import possible_architectures
    from sapwood_worker.model.families.registry import families

    possible = possible_architectures()
    assert possible is not None
    own = {name for family in families() for name in (*family.architectures, *family.classifiers)}
    assert own <= possible
    assert {name.replace("ForCausalLM", "Model") for name in own} <= possible


def test_the_gguf_architectures_found_without_importing_families_are_those_that_families_read() -> None:
    from sapwood_worker.model.families.names import gguf_architectures
    from sapwood_worker.model.families.registry import families

    read = {family.gguf_name or family.name for family in families() if family.from_gguf is not None}
    assert gguf_architectures() == read


@pytest.mark.parametrize(
    ("architecture", "said"), [("bert", "bert"), ("nomic\nbert", r"nomic\nbert"), (None, "(none)")]
)
def test_a_gguf_file_of_an_unknown_architecture_is_refused_before_a_service_starts(
    architecture: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture or "none")
    if architecture is None:
        del writer.kv_data[0]["general.architecture"]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main(["up", str(path), "--ports", "auto"]) == 2
    printed = capsys.readouterr()
    assert (
        f"--model: {path}: general.architecture {said} is not read from GGUF files; `sapwood docs models`"
        in printed.err
    )
    assert printed.err.count("\n") == 1
    assert "starting" not in printed.out


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"architectures": ["QwenForCausalLM"]}', "architecture QwenForCausalLM is not supported; did you mean Qwen"),
        ("{}", "architecture (none) is not supported; `sapwood docs models` lists those that are"),
        ("{bad", "cannot be read as JSON"),
        ('{"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8}', "--tensor-parallel 3: the model has 8"),
    ],
)
def test_what_a_config_file_shows_is_refused_before_a_service_starts(
    config: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert main(["up", str(tmp_path), "--ports", "auto", "--tensor-parallel", "3"]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert "starting" not in printed.out
