"""Settings of several parts, and settings that got another name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from pydantic import Field
from pydantic_settings import NoDecode, SettingsConfigDict

from sapwood_common.errors import ConfigError
from sapwood_common.settings.compound import Compound, Switch, parts_of, shown, text_of
from sapwood_common.settings.config import ServiceConfig, build_parser, command_line, given_settings, load_config
from sapwood_common.settings.needs import Needs
from sapwood_common.settings.retired import Retired, compound_of, retired_parts
from sapwood_router.config import RouterConfig
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_worker.config import WorkerConfig


class Queue(Compound):
    size: int = Field(default=1024, ge=0)
    wait: float = Field(default=30.0, gt=0)


class Cache(Switch):
    on: bool = True
    eviction: str = "lru"


class Example(ServiceConfig):
    needs: ClassVar = (Needs(("queue.wait",), lambda config: config.queue.size > 0, "where {queue} is 0"),)
    retired: ClassVar = {
        **retired_parts("queue", queue_wait="wait"),
        **retired_parts("cache", eviction="eviction"),
        "listen": Retired("port", ""),
        "caching": Retired("cache", "on", switch=True),
    }
    model_config = SettingsConfigDict(env_prefix="SAPWOOD_EXAMPLE_")

    port: int = Field(1, description="Port.")
    queue: Annotated[Queue, NoDecode] = Field(Queue(), description="Waiting requests.")
    cache: Annotated[Cache, NoDecode] = Field(Cache(), description="Cache.")


def load(*argv: str) -> Example:
    arguments = build_parser(Example, "example", "").parse_args(argv)
    return load_config(Example, given_settings(Example, arguments), arguments.config)


@pytest.mark.parametrize(
    ("flags", "size", "wait"),
    [
        ((), 1024, 30),
        (("--queue", "5"), 5, 30),
        (("--queue", "5,wait=2"), 5, 2),
        (("--queue", "wait=2"), 1024, 2),
        (("--queue=size=5, wait=2",), 5, 2),
    ],
)
def test_the_first_part_is_given_alone_and_others_by_name(flags: tuple[str, ...], size: int, wait: float) -> None:
    assert load(*flags).queue == Queue(size=size, wait=wait)


@pytest.mark.parametrize(
    ("flags", "on", "eviction"),
    [
        ((), True, "lru"),
        (("--cache",), True, "lru"),
        (("--no-cache",), False, "lru"),
        (("--cache", "off"), False, "lru"),
        (("--cache", "eviction=lfu"), True, "lfu"),
        (("--cache", "on,eviction=lfu"), True, "lfu"),
    ],
)
def test_a_switch_with_parts_is_on_or_off(flags: tuple[str, ...], on: bool, eviction: str) -> None:
    cache = load(*flags).cache
    assert (bool(cache), cache.on, cache.eviction) == (on, on, eviction)


def test_variables_and_files_hold_the_text_and_files_a_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "example.yaml"
    for text in ("queue: 7,wait=3\n", "queue: {size: 7, wait: 3}\n"):
        file.write_text(text + "cache: false\n")
        assert load("--config", str(file)).queue == Queue(size=7, wait=3)
        assert not load("--config", str(file)).cache.on
    file.write_text("cache: {on: false, eviction: lfu}\n")  # YAML reads this key as true
    assert load("--config", str(file)).cache == Cache(on=False, eviction="lfu")
    assert text_of({True: False, "eviction": "lfu"}) == "on=False,eviction=lfu"
    monkeypatch.setenv("SAPWOOD_EXAMPLE_QUEUE", "8")
    assert load("--config", str(file)).queue == Queue(size=8)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--queue", "5,wait=0"), "--queue wait / SAPWOOD_EXAMPLE_QUEUE: Input should be greater than 0 (got '0')"),
        (("--queue", "5,wiat=1"), "'wiat=1' is no part: write SIZE or NAME=VALUE, of size, wait"),
        (("--queue", "5,wait=1,wait=2"), "wait is given twice"),
        (("--queue", "0,wait=1"), "--queue wait / SAPWOOD_EXAMPLE_QUEUE: has no effect where --queue is 0"),
    ],
)
def test_a_wrong_part_is_named(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*flags)
    assert message in str(caught.value)


def test_a_mapping_on_a_command_line_is_read_back() -> None:
    given = {"queue": {"size": 3, "wait": 1.5}, "cache": "off"}
    assert load(*command_line(given)).queue == Queue(size=3, wait=1.5)
    assert parts_of(Queue, text_of(given["queue"])) == {"size": "3", "wait": "1.5"}
    assert shown(Cache(on=False)) == "off,eviction=lru"


def test_an_old_flag_works_and_a_warning_names_the_new_one(caplog: pytest.LogCaptureFixture) -> None:
    config = load("--queue", "5", "--queue-wait", "2", "--eviction", "lfu", "--listen", "9")
    assert (config.queue, config.cache, config.port) == (Queue(size=5, wait=2), Cache(eviction="lfu"), 9)
    assert caplog.messages == [
        "--queue-wait is now --queue wait=2; the old name will be gone in the next version",
        "--eviction is now --cache eviction=lfu; the old name will be gone in the next version",
        "--listen is now --port; the old name will be gone in the next version",
    ]
    assert load("--no-caching").cache == Cache(on=False)
    assert load("--port", "3", "--listen", "9").port == 3, "the present name wins"


def test_an_old_variable_and_an_old_entry_of_a_file_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "example.yaml"
    file.write_text("queue_wait: 4\nqueue: 6\n")
    assert load("--config", str(file)).queue == Queue(size=6, wait=4)
    assert f"queue_wait is now {file}: queue wait=4" in caplog.text
    monkeypatch.setenv("SAPWOOD_EXAMPLE_QUEUE_WAIT", "5")
    assert load("--config", str(file)).queue == Queue(size=6, wait=5)
    assert "SAPWOOD_EXAMPLE_QUEUE_WAIT is now SAPWOOD_EXAMPLE_QUEUE wait=5" in caplog.text
    monkeypatch.setenv("SAPWOOD_EXAMPLE_QUEUE", "7")
    assert load("--config", str(file)).queue == Queue(size=7, wait=5)
    assert load("--queue", "8").queue == Queue(size=8), "a flag wins over variables"


def test_an_old_name_works_in_a_constructor() -> None:
    assert Example.model_validate({"queue_wait": 2}).queue == Queue(wait=2)


@pytest.mark.parametrize("cls", [RouterConfig, TokenizerConfig, WorkerConfig])
def test_every_old_name_of_every_service_leads_to_a_setting(cls: type[ServiceConfig]) -> None:
    assert cls.retired
    assert not set(cls.retired) & set(cls.model_fields)
    for old, new in cls.retired.items():
        compound = compound_of(cls, new.setting)
        assert (compound is not None and new.part in compound.model_fields) or not new.part, old
    help_text = build_parser(cls, "service", "").format_help()
    assert not [old for old in cls.retired if f"--{old.replace('_', '-')} " in help_text]


def test_services_have_at_most_150_flags() -> None:
    assert sum(len(cls.model_fields) for cls in (RouterConfig, TokenizerConfig, WorkerConfig)) <= 150
