"""Arguments of calls in a history: an object stays as it is, and everything else becomes one."""

import json

import pytest

from sapwood_router.request.arguments import arguments_text, whole_arguments

FULL = '{"a": "x\\u00fc\\ud83d\\ude00\\n\\\\", "b": [1, 2.5, {"c": true, "d": null}], "e": {}, "f": -3e5, "\\"k": "v\\\\u12"}'


def test_an_object_stays_as_it_is() -> None:
    for text in (FULL, "{}", ' {"a": 1}\n', '{"a":{"b":[]}}'):
        assert whole_arguments(text) == text


def test_arguments_cut_anywhere_are_closed_and_lose_no_more_than_a_value() -> None:
    whole = json.loads(FULL)
    kept = 0
    for end in range(1, len(FULL)):
        found = json.loads(whole_arguments(FULL[:end]))
        assert isinstance(found, dict)
        assert list(found) == list(whole)[: len(found)], FULL[:end]
        complete = list(found)[:-1]
        assert [found[name] for name in complete] == [whole[name] for name in complete], FULL[:end]
        kept = max(kept, len(found))
    assert kept == len(whole)


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("", {}),
        ("  ", {}),
        ("null", {}),
        ('{"a": ', {}),
        ('{"a": "ls -l', {"a": "ls -l"}),
        ('{"a": 1}}', {"a": 1}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": 1} and more', {"a": 1}),
        ('{"a": tru', {}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('"{\\"a\\": "', {}),
        ("[1]", {"arguments": [1]}),
        ("ls -l", {"arguments": "ls -l"}),
        ("{a: 1", {"arguments": "{a: 1"}),
    ],
)
def test_what_is_no_object_becomes_one(text, made) -> None:
    assert json.loads(whole_arguments(text)) == made


def test_long_and_deep_arguments_take_no_time() -> None:
    text = "x" * 1_000_000
    assert json.loads(whole_arguments('{"file": "a", "content": "' + text)) == {"file": "a", "content": text}
    for hostile in ('{"a":' * 200_000, "[" * 200_000, '{"a": [' + "1," * 400_000, '{"a": "' + "\\" * 999_999):
        assert isinstance(json.loads(whole_arguments(hostile)), dict)


def test_an_object_may_be_sent_instead_of_its_text() -> None:
    assert arguments_text({"a": [1]}) == '{"a":[1]}'
    assert (arguments_text(None), arguments_text("x")) == ("", "x")
