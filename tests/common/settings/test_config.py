import argparse
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from sapwood_common.errors import ConfigError
from sapwood_common.settings.config import (
    ServiceConfig,
    add_settings,
    build_parser,
    command_line,
    given_settings,
    load_config,
    parse_config,
)


class ExampleConfig(ServiceConfig):
    model_config = SettingsConfigDict(env_prefix="SAPWOOD_EXAMPLE_")

    port: int = Field(50070, ge=0, le=65535, description="Port.")
    policy: Literal["fcfs", "lpm"] = Field("fcfs", description="Order of the queue.")
    workers: tuple[str, ...] = Field((), description="Addresses.")
    cache: bool = Field(True, description="Whether 100 % is cached.")
    model: str = Field(description="Model.")


def load(*argv: str) -> ExampleConfig:
    arguments = build_parser(ExampleConfig, "example", "text").parse_args(argv)
    return load_config(ExampleConfig, given_settings(ExampleConfig, arguments), arguments.config)


def test_precedence_is_flag_then_variable_then_file_then_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 1\nmodel: from-file\nlog-level: debug\n")
    assert load("--config", str(file)).port == 1
    assert load("--config", str(file)).log_level == "debug"
    monkeypatch.setenv("SAPWOOD_EXAMPLE_PORT", "2")
    assert load("--config", str(file)).port == 2
    assert load("--config", str(file), "--port", "3").port == 3
    assert load("--config", str(file)).policy == "fcfs"


def test_lists_and_booleans_come_from_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("--model", "m", "--workers", "a:1", "b:2", "--no-cache")
    assert config.workers == ("a:1", "b:2")
    assert config.cache is False


def test_help_names_every_variable_and_default() -> None:
    text = build_parser(ExampleConfig, "example", "text").format_help().replace("\n", " ")
    text = " ".join(text.split())
    for name in ExampleConfig.model_fields:
        assert f"SAPWOOD_EXAMPLE_{name.upper()}" in text
    assert "default: 50070" in text
    assert "{fcfs,lpm}" in text
    assert "default: none, required" in text


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--model", "m", "--port", "-1"), "--port / SAPWOOD_EXAMPLE_PORT"),
        (("--model", "m", "--port", "many"), "got 'many'"),
        (("--model", "m", "--policy", "best"), "--policy"),
        ((), "--model / SAPWOOD_EXAMPLE_MODEL: Field required"),
        (("--model", "m", "--config", "/nowhere.yaml"), "/nowhere.yaml"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_flag(argv: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=r".*") as caught:
        load(*argv)
    assert named in str(caught.value)


def test_an_unknown_setting_in_the_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("modell: m\n")
    with pytest.raises(ConfigError, match="unknown setting 'modell'"):
        load("--config", str(file))


def test_with_a_prefix_the_same_flags_are_another_programs_and_errors_name_them_so() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port")
    add_settings(parser, ExampleConfig, "example-", without={"model"})
    asked = ["--port", "1", "--example-port", "2", "--no-example-cache", "--example-workers", "a:1", "b:2"]
    given = given_settings(ExampleConfig, parser.parse_args(asked), "example-")
    assert given == {"port": "2", "cache": False, "workers": ["a:1", "b:2"]}
    assert load(*command_line(given | {"model": "-m", "policy": "lpm"})).model_dump(
        include={*given, "model", "policy"}
    ) == {
        "port": 2,
        "cache": False,
        "workers": ("a:1", "b:2"),
        "model": "-m",
        "policy": "lpm",
    }
    with pytest.raises(SystemExit):
        parser.parse_args(["--example-model", "m"])
    with pytest.raises(ConfigError, match=r"--example-port / SAPWOOD_EXAMPLE_PORT: .* \(got '-2'\)"):
        load_config(ExampleConfig, given | {"port": "-2", "model": "m"}, prefix="example-")
    with pytest.raises(ConfigError, match=r"--example-config: cannot read /nowhere\.yaml"):
        load_config(ExampleConfig, given, "/nowhere.yaml", prefix="example-")


def test_the_command_line_exits_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_config(ExampleConfig, "example", "text", ["--port", "x", "--model", "m"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_misspelt_flag_is_told_without_all_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(ExampleConfig, "example", "text", ["--prot=3", "--model", "m"])
    assert ended.value.code == 2
    told = "example: error: unrecognized arguments: --prot=3; did you mean --port?"
    assert capsys.readouterr().err.splitlines() == ["usage: example [FLAG ...]", told]
