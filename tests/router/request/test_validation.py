"""What a client asks for is checked before any other service is asked."""

from __future__ import annotations

import pytest

from sapwood_common.contract.limits import LONGEST_STOP, MOST_STOPS
from sapwood_common.errors import InvalidArgumentError
from sapwood_router.request.context import ChatPrompt, FieldNames, ToolCall, Turn
from sapwood_router.request.validation import check_bad_words, check_grammar, check_prompt, check_stop, extent


@pytest.mark.parametrize("stop", [("a",) * (MOST_STOPS + 1), ("a", ""), ("a", "b" * (LONGEST_STOP + 1))])
def test_stop_strings_are_few_not_empty_and_not_long(stop) -> None:
    """The tokenizer looks for each in all that is generated."""
    with pytest.raises(InvalidArgumentError) as refused:
        check_stop(stop, "stop_sequences")
    assert refused.value.field == "stop_sequences"
    check_stop(("a", "b" * LONGEST_STOP))
    check_stop(())


def test_bad_words_are_not_long() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        check_bad_words(("b" * (LONGEST_STOP + 1),))
    assert refused.value.field == "bad_words"
    check_bad_words(("b" * LONGEST_STOP,))


def test_a_grammar_is_not_longer_than_any_tokenizer_takes() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        check_grammar("a" * (2 * 1024 * 1024 + 1), "regex")
    assert refused.value.field == "regex"
    check_grammar("a" * 2 * 1024 * 1024, "regex")


def test_what_the_tokenizer_parses_of_a_conversation_is_bounded_and_counts() -> None:
    def said(variables: int = 0, arguments: int = 0) -> ChatPrompt:
        call = ToolCall("c", "f", "a" * arguments)
        return ChatPrompt((Turn("assistant", "", tool_calls=(call,)),), "", "v" * variables)

    fields = FieldNames(prompt="messages", template_variables="chat_template_kwargs")
    for prompt, field in (
        (said(variables=2 * 2**20 + 1), "chat_template_kwargs"),
        (said(arguments=2**20 + 1), "messages"),
    ):
        with pytest.raises(InvalidArgumentError) as refused:
            check_prompt(prompt, fields)
        assert refused.value.field == field
    most = said(variables=2 * 2**20, arguments=2**20)
    check_prompt(most, fields)
    assert extent(most) >= 3 * 2**20
