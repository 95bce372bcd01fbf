from hypothesis import given
from hypothesis import strategies as st

from sapwood_common.contract.page_hash import hash_pages

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, tokens, st.integers(1, 8))
def test_two_prompts_share_exactly_the_hashes_of_their_common_full_pages(
    first: list[int], second: list[int], page_size: int
) -> None:
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    hashes = [hash_pages(prompt, page_size) for prompt in (first, second)]
    shared = sum(a == b for a, b in zip(*hashes, strict=False))
    assert shared == min(common // page_size, *map(len, hashes))


@given(tokens, st.integers(1, 8))
def test_pages_hashed_one_by_one_are_the_chain(prompt: list[int], page_size: int) -> None:
    chain, parent = [], b""
    for start in range(0, len(prompt) // page_size * page_size, page_size):
        (parent,) = hash_pages(prompt[start : start + page_size], page_size, salt=parent)
        chain.append(parent)
    assert hash_pages(prompt, page_size) == chain


def test_a_salt_separates_equal_prompts() -> None:
    plain, salted = hash_pages([1, 2, 3, 4], 2), hash_pages([1, 2, 3, 4], 2, salt=b"tenant")
    assert not set(plain) & set(salted)
