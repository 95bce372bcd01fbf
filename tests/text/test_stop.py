from hypothesis import given
from hypothesis import strategies as st

from sapwood_text.detokenizer import StopMatcher

short = st.text(alphabet="abX", max_size=24) | st.text(alphabet="ab", max_size=60)
stops = st.lists(
    st.text(alphabet="abX", min_size=1, max_size=4) | st.text(alphabet="ab", min_size=1, max_size=9), max_size=4
)


def by_the_letter(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The plain definition: read a character at a time; the first one that completes a stop string ends the text."""
    for end in range(1, len(text) + 1):
        completed = [s for s in stop if text[:end].endswith(s)]
        if completed:
            longest = max(completed, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(short, stops, st.data())
def test_any_cut_of_the_text_gives_what_the_definition_gives(text: str, stop: list[str], data: st.DataObject) -> None:
    expected, match = by_the_letter(text, stop)
    matcher = StopMatcher(stop)
    shown, rest = "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        released, found = matcher.push(rest[:size])
        rest = rest[size:]
        shown += released
        assert expected.startswith(shown), "something of a stop string leaked"
        if found is not None:
            assert (shown, found) == (expected, match)
            return
    assert match is None
    assert shown + matcher.finish() == expected


@given(short, stops)
def test_every_cut_in_two_gives_what_the_definition_gives(text: str, stop: list[str]) -> None:
    expected = by_the_letter(text, stop)
    for cut in range(len(text) + 1):
        matcher = StopMatcher(stop)
        shown, match = matcher.push(text[:cut])
        if match is None:
            more, match = matcher.push(text[cut:])
            shown += more
        assert (shown + ("" if match else matcher.finish()), match) == expected


def test_long_stop_strings_that_almost_match_all_the_time_do_not_leak() -> None:
    stop = ["a" * 1023 + "b", "b" + "a" * 1023, ("ab" * 512)[:-1] + "X"]
    matcher = StopMatcher(stop)
    text = "a" * 3000 + "ab" * 600
    shown = ""
    for character in text:
        released, match = matcher.push(character)
        shown += released
        if match is not None:
            break
    assert (shown, match) == by_the_letter(text, stop) == ("a" * (3001 - 1023), stop[0])


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("hello") == ("hello", None)
    assert matcher.push(" E") == (" ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("T") == ("ENT", None)
