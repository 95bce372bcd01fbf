"""Names of parts are checked when the settings are read, before a model is: those of packages are known by their entry points."""

from __future__ import annotations

import pytest

from sapwood_common.errors import ConfigError
from sapwood_common.settings.config import load_config
from sapwood_worker.config import WorkerConfig
from sapwood_worker.model.attention import registry as attention
from sapwood_worker.model.grammar import registry as grammar
from sapwood_worker.settings import OWN_ATTENTION_BACKENDS, OWN_GRAMMAR_BACKENDS, attention_of


def test_halves_of_attention_are_named_apart() -> None:
    assert attention_of("triton") == {"prefill": "triton", "decode": "triton"}
    assert attention_of("decode=torch,prefill=triton") == {"prefill": "triton", "decode": "torch"}
    assert attention_of("decode=torch") == {"prefill": "auto", "decode": "torch"}


@pytest.mark.parametrize(
    "setting", ["prefil=torch", "prefill=", "prefill=torch,triton", "prefill=torch,prefill=torch", "torch,triton"]
)
def test_a_malformed_attention_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"'{setting}': write NAME, or prefill=NAME,decode=NAME$"):
        load_config(WorkerConfig, {"model": "demo", "attention_backend": setting})


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("attention_backend", "fa9", "auto, fixed_order, flashinfer, native, torch, triton"),
        ("attention_backend", "decode=fa9", "auto, fixed_order, flashinfer, native, torch, triton"),
        ("quantization", "fa9", "fp8, fp8_block, fp8_tensor, int4, int8, none"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_known(name: str, value: str, known: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(WorkerConfig, {"model": "demo", name: value})
    flag = name.replace("_", "-")
    whole = "" if value == "fa9" else f" (got {value!r})"
    assert str(refused.value) == f"--{flag} / SAPWOOD_WORKER_{name.upper()}: 'fa9' is none of {known}{whole}"


def test_an_unknown_grammar_backend_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"--structured-output backend / .*: 'fa9' is none of llguidance, xgrammar"):
        load_config(WorkerConfig, {"model": "demo", "structured_output": "backend=fa9"})


def test_the_names_are_those_of_the_registries() -> None:
    assert set(attention._BACKENDS) == set(OWN_ATTENTION_BACKENDS)
    assert set(grammar._BACKENDS) == set(OWN_GRAMMAR_BACKENDS)


def test_a_package_s_name_is_known(plugin) -> None:  # type: ignore[no-untyped-def]
    plugin("sapwood.attention_backends", "plain", "BACKEND = None", "BACKEND")
    assert WorkerConfig(model="demo", attention_backend="prefill=plain").attention_backend == "prefill=plain"
