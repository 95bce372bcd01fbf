"""Pages with pictures: named by the whole digest, alike in tree, chains and router, whatever numbers a process uses."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sapwood_common.contract.page_hash import hash_pages
from sapwood_common.contract.pictures import PictureSpan, picture_digest
from sapwood_common.contract.sampling import SamplingParams
from sapwood_router.routing.policies.base import PromptPages
from sapwood_worker.core.cache.page_key import FIRST_NUMBER, KvEventLog, PageChain, PictureNames
from sapwood_worker.core.cache.radix import RadixTree
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.records.kv_events import split_hashes
from sapwood_worker.records.pictures import Picture

PAGE, PAD, BREAK = 4, 90, 91


def digest_of(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[Picture]]:
    """Texts and pictures in any order; pictures may have other tokens between theirs, and may be the same."""
    tokens: list[int] = []
    pictures: list[Picture] = []
    for _ in range(draw(st.integers(0, 6))):
        tokens += draw(st.lists(st.integers(1, 3), max_size=7))
        rows = draw(st.lists(st.integers(1, 4), max_size=4))
        if not rows:
            continue
        shown: list[int] = []
        for index, row in enumerate(rows):
            shown += [BREAK] * (index > 0) + [PAD] * row
        pictures.append(Picture(len(tokens), len(shown), digest_of(draw(st.integers(0, 2))), (1, 1, 1)))
        tokens += shown
    return tokens + draw(st.lists(st.integers(1, 3), min_size=1, max_size=9)), pictures


def request_of(tokens: list[int], pictures: list[Picture], names: PictureNames) -> Request:
    request = Request(1, "r", tokens, SamplingParams(), pictures=tuple(pictures))
    if pictures:
        request.name_pictures(names)
    return request


def spans_of(pictures: list[Picture]) -> list[PictureSpan]:
    return [PictureSpan(each.offset, each.length, PAD, each.digest) for each in pictures]


def model_of(tokens: list[int], pictures: list[Picture]) -> list[tuple[object, ...]]:
    """What each token is, for people: itself, or a part of a picture."""
    found: list[tuple[object, ...]] = [(token,) for token in tokens]
    for each in pictures:
        for place in range(each.offset, each.end):
            if tokens[place] == PAD:
                found[place] = (PAD, each.digest)
    return found


@given(layouts())
def test_router_tree_and_chain_hash_a_prompt_with_pictures_alike(made: tuple[list[int], list[Picture]]) -> None:
    tokens, pictures = made
    names = PictureNames()
    for number in range(3):
        names.name(digest_of(9 - number), PAD)  # this process has other numbers than the next one
    request = request_of(tokens, pictures, names)
    chain = PageChain(b"salt", PAGE, names=names)
    chain.extend(request.keyed, len(tokens))
    log = KvEventLog(names)
    tree = RadixTree(PAGE, events=log, pictures=names)
    whole = len(tokens) // PAGE
    if whole:
        tree.insert(
            tree.match(b"", b"salt").node, request.keyed[: whole * PAGE].tobytes(), np.arange(whole, dtype=np.int32)
        )
    expected = hash_pages(tokens, PAGE, salt=b"salt", pictures=spans_of(pictures))
    assert [key.hash for key in chain.keys] == expected
    events = log.take()
    assert [each for event in events for each in split_hashes(event.hashes)] == expected
    assert all(max(array("I", event.token_ids)) < FIRST_NUMBER for event in events)
    prompt = PromptPages(tokens, pictures=spans_of(pictures))
    for _ in prompt.hash_steps(PAGE, 2 * PAGE):
        pass
    assert prompt.hashes(PAGE) == hash_pages(tokens, PAGE, pictures=spans_of(pictures))
    assert PromptPages(tokens[:-1], pictures=spans_of(pictures)).extended(tokens[-1:], PAGE) == prompt.hashes(PAGE)


@given(layouts(), layouts())
def test_two_prompts_share_pages_as_far_as_tokens_and_pictures_agree(
    one: tuple[list[int], list[Picture]], other: tuple[list[int], list[Picture]]
) -> None:
    names = PictureNames()
    models = [model_of(*each) for each in (one, other)]
    same = next((at for at, pair in enumerate(zip(*models, strict=False)) if pair[0] != pair[1]), min(map(len, models)))
    keys = []
    tree = RadixTree(PAGE, pictures=names)
    for tokens, pictures in (one, other):
        request = request_of(tokens, pictures, names)
        chain = PageChain(b"", PAGE, names=names)
        chain.extend(request.keyed, len(tokens))
        keys.append((chain.keys, request.keyed))
    shared = sum(mine == theirs for mine, theirs in zip(keys[0][0], keys[1][0], strict=False))
    assert shared == same // PAGE
    whole = len(one[0]) // PAGE
    tree.insert(tree.match(b"").node, keys[0][1][: whole * PAGE].tobytes(), np.arange(whole, dtype=np.int32))
    assert len(tree.match(keys[1][1].tobytes()).pages) == same // PAGE


def test_a_picture_that_was_forgotten_gets_another_number_and_the_same_hashes() -> None:
    names = PictureNames()
    picture = Picture(0, 4, digest_of(1), (1, 1, 1))
    first = request_of([PAD] * 4 + [1], [picture], names)
    hashes = PageChain(b"", PAGE, names=names)
    hashes.extend(first.keyed, 4)
    number = first.keyed[0]
    del first
    for each in range(5000):
        names.name(each.to_bytes(32, "big"), PAD)
    again = request_of([PAD] * 4 + [1], [picture], names)
    assert again.keyed[0] not in (number, PAD)
    later = PageChain(b"", PAGE, names=names)
    later.extend(again.keyed, 4)
    assert later.keys == hashes.keys
    assert names.plain(array("I", [number, again.keyed[0], 7]).tobytes()) == array("I", [0, PAD, 7]).tobytes()


def test_a_digest_holds_tenant_size_layout_and_every_pixel() -> None:
    pixels = bytes(range(36))
    digests = {
        picture_digest(salt, shape, layout, content)
        for salt in ("", "tenant")
        for shape in ((1, 3, 4), (1, 4, 3), (2, 3, 2))
        for layout in ((), (1,), (1, 2))
        for content in (pixels, pixels[::-1])
    }
    assert len(digests) == 2 * 3 * 3 * 2


def test_tokens_that_are_generated_follow_those_of_pictures_in_keys() -> None:
    names = PictureNames()
    request = request_of([PAD, PAD, 5], [Picture(0, 2, digest_of(0), (1, 1, 1))], names)
    request.token_ids.append(6)
    request.token_ids.append(PAD)
    assert request.keyed.tolist() == [FIRST_NUMBER, FIRST_NUMBER, 5, 6, PAD]
    assert request.token_ids.tolist() == [PAD, PAD, 5, 6, PAD]
