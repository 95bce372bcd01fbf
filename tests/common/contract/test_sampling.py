"""The one list of sampling fields, its ranges, and how far a field's name spreads."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from sapwood.generation import Options
from sapwood.v1 import common_pb2
from sapwood_common.contract.sampling import FIELDS, USUAL, LogitProcessorCall, check_tokens, read_sampling
from sapwood_common.contract.sampling_message import from_message, to_message
from sapwood_common.errors import InvalidArgumentError

ROOT = Path(__file__).resolve().parents[3]


def test_messages_services_and_client_know_the_same_fields() -> None:
    fields = set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert fields == FIELDS | {"n"}
    assert fields <= set(Options.__annotations__)


def test_a_field_is_named_in_few_files() -> None:
    # docs/development.md lists them. The last but two is there for its flag, which a field need not have, the last but
    # one because another engine's protocol has a field of that name, the last because models' files may have a default of it.
    sources = [
        path
        for folder in ("protos", "sapwood", "services", "kernels")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".proto") and "_pb2" not in path.name
    ]
    naming = {str(path.relative_to(ROOT)) for path in sources if re.search(r"\bmin_p\b", path.read_text())}
    assert naming == {
        "protos/sapwood/v1/common.proto",
        "services/common/sapwood_common/contract/sampling.py",
        "sapwood/generation.py",
        "sapwood/lang/nodes.py",
        "sapwood/lang/backends/openai.py",
        "services/worker/sapwood_worker/model/sampling/row_settings.py",
        "kernels/sapwood_kernels/sampling/cpu_sampling.py",
        "kernels/sapwood_kernels/sampling/triton_sampling.py",
        "sapwood/cli/request.py",
        "services/worker/sapwood_worker/front/sglang/sglang_convert.py",
        "services/worker/sapwood_worker/model/checkpoint/generation_config.py",
    }


GIVEN: dict[str, Any] = {
    "temperature": 0.0, "top_k": 4, "top_p": 0.5, "min_p": 0.25, "seed": 0, "max_tokens": 9, "stop_token_ids": (1, 2),
    "ignore_eos": True, "frequency_penalty": -2.0, "presence_penalty": 2.0, "repetition_penalty": 1.5,
    "logit_bias": {5: -100.0, 7: 1.5}, "min_tokens": 3, "logprobs": 0, "prompt_logprobs": 20, "prompt_logprobs_start": 7,
    "allowed_token_ids": (0, 2**32 - 1), "bad_words_ids": ((3,), (4, 5)),
    "speculate": False,
    "logit_processors": (LogitProcessorCall("one", {"a": [1, {"b": None}]}), LogitProcessorCall("two")),
}  # fmt: skip


def test_every_field_survives_the_way_over_the_wire() -> None:
    assert GIVEN.keys() == FIELDS
    params = read_sampling(GIVEN)
    assert from_message(to_message(params)) == (params, 1)
    assert all(getattr(params, name) == value for name, value in GIVEN.items())


def test_what_is_not_given_is_the_usual_and_a_seed_is_drawn() -> None:
    empty = common_pb2.SamplingParams()
    (one, count), (other, _) = from_message(empty), from_message(empty)
    assert count == 1
    assert one.seed != other.seed
    assert to_message(USUAL) == common_pb2.SamplingParams(seed=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", 0),
        ("top_k", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", 2),
        ("seed", 2**64),
        ("seed", -1),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 1025),
        ("presence_penalty", math.nan),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {5: 101}),
        ("logit_bias", dict.fromkeys(range(1025), 1)),
        ("logprobs", 21),
        ("allowed_token_ids", [2**32]),
        ("allowed_token_ids", [1] * 65537),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", [[1] * 33]),
        ("bad_words_ids", [[1]] * 513),
        ("bad_words_ids", [1]),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{field}") as caught:
        read_sampling({field: value})
    assert caught.value.field == f"sampling.{field}"


def test_the_models_own_defaults_apply_where_a_request_says_nothing() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    assert read_sampling({"seed": 1}).applied({}) == read_sampling({"seed": 1})
    for given in ({}, {"temperature": 1}, {"temperature": 0.2}, {"temperature": 0.0, "top_k": 3}):
        shown = read_sampling({"seed": 1, **given}).applied(defaults)
        at_the_worker = read_sampling({"seed": 1, **given}, defaults=defaults)
        assert (shown.temperature, shown.top_k) == (at_the_worker.temperature, at_the_worker.top_k)


def test_keys_of_a_logit_bias_that_are_wrong_are_all_named() -> None:
    for bias, named in (
        ({"not_a_token": 5, "1": 1, "another": 5}, "'not_a_token', 'another'"),
        ({"1": "x", "2": 101}, "'1', '2'"),
        ({5: 1, 7: 101}, "at 7"),
        ({f"k{number}": 1 for number in range(10)}, "'k7' and 2 more"),
        ({"x" * 1000: 1}, f"'{'x' * 40}'"),
    ):
        with pytest.raises(InvalidArgumentError, match=r"^logit_bias: expected ") as caught:
            read_sampling({"logit_bias": bias})
        assert caught.value.message.endswith(named)


@pytest.mark.parametrize("parameters", ["{", "[" * 60_000, "[" + "1," * 40_000])
def test_what_a_processor_is_told_is_json_of_no_great_length_or_depth(parameters: str) -> None:
    call = common_pb2.LogitProcessor(name="f", parameters=parameters)
    with pytest.raises(InvalidArgumentError, match=r"^logit_processors: ") as caught:
        from_message(common_pb2.SamplingParams(logit_processors=[call]))
    assert caught.value.field == "sampling.logit_processors"


def test_the_least_and_the_most_tokens_must_agree() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_sampling({"min_tokens": 4, "max_tokens": 3})
    assert caught.value.field == "sampling.min_tokens"
    # Of a request that continues after 2 tokens, max_tokens is what is left.
    assert read_sampling({"min_tokens": 4, "max_tokens": 3}, done=2).min_tokens == 4


@pytest.mark.parametrize(
    "given",
    [
        {"stop_token_ids": [3, 50]},
        {"logit_bias": {50: 1.0}},
        {"allowed_token_ids": [50]},
        {"bad_words_ids": [[1], [2, 50, 3]]},
    ],
)
def test_tokens_the_model_lacks_are_refused(given: dict[str, Any]) -> None:
    check_tokens(read_sampling(given), 51)
    with pytest.raises(InvalidArgumentError) as caught:
        check_tokens(read_sampling(given), 50)
    assert caught.value.field == f"sampling.{next(iter(given))}"


def test_model_defaults_replace_only_what_a_request_leaves_out() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}

    def served(**given: Any) -> Any:
        """What a worker with these defaults makes of the message that a router sends of a request."""
        message = to_message(read_sampling(given))
        return from_message(message, defaults=defaults)[0]

    left_out = served(max_tokens=3)
    assert (left_out.temperature, left_out.top_k, left_out.top_p, left_out.min_p) == (0.6, 20, 0.95, 0.0)
    assert left_out.repetition_penalty == 1.05
    usual = served(temperature=1.0, top_p=1, repetition_penalty=1.0, min_p=0.0)
    assert (usual.temperature, usual.top_p, usual.repetition_penalty, usual.top_k) == (1.0, 1.0, 1.0, 20)
    own = served(temperature=0.0, top_k=7)
    assert (own.temperature, own.top_k, own.top_p) == (0.0, 7, 0.95)


def test_without_defaults_a_message_has_what_differs_from_the_usual_or_was_set_to_it() -> None:
    assert {field.name for field, _ in to_message(read_sampling({"seed": 1})).ListFields()} == {"seed"}
    set_to_usual = to_message(read_sampling({"seed": 1, "temperature": 1.0, "max_tokens": 4}))
    assert {field.name for field, _ in set_to_usual.ListFields()} == {"seed", "temperature", "max_tokens"}


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "max_tokens", "min_tokens", "presence_penalty"])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_integer_that_no_float_is_near_to_is_refused_by_name(field: str, sign: int) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        read_sampling({field: sign * 10**400})
