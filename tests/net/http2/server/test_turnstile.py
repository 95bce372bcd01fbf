import asyncio

from sapwood_net.http2.server.turnstile import LEAST_A_TURN, LONG, MOST_A_TURN, Turnstile
from sapwood_net.http2.server.waiting_line import Rank


def make_turnstile() -> Turnstile:
    """A turnstile on a clock that stands still: no turn takes too long."""
    return Turnstile(lambda: 0.0)


async def test_calls_begin_in_order_and_a_few_a_turn() -> None:
    turnstile, begun = make_turnstile(), []
    for number in range(3 * MOST_A_TURN):
        turnstile.enter(lambda number=number: begun.append(number))
    counts = [len(begun)]
    while len(begun) < 3 * MOST_A_TURN:
        await asyncio.sleep(0)
        counts.append(len(begun))
    assert counts == [MOST_A_TURN, 2 * MOST_A_TURN, 3 * MOST_A_TURN]
    assert begun == sorted(begun)


async def test_fewer_begin_while_turns_take_long_and_more_again_once_they_do_not() -> None:
    clock, begun = [0.0], []
    turnstile = Turnstile(lambda: clock[0])
    for number in range(100):
        turnstile.enter(lambda number=number: begun.append(number))
    counts = [len(begun)]
    for took in (2 * LONG, 2 * LONG, LONG / 2, LONG / 2, 2 * LONG):
        clock[0] += took
        await asyncio.sleep(0)
        counts.append(len(begun) - sum(counts))
    assert counts == [MOST_A_TURN, LEAST_A_TURN, LEAST_A_TURN, LEAST_A_TURN + 1, LEAST_A_TURN + 2, LEAST_A_TURN]


async def test_who_comes_while_others_wait_comes_after_them_and_alone_at_once() -> None:
    turnstile, begun = make_turnstile(), []
    for number in range(MOST_A_TURN + 1):
        turnstile.enter(lambda number=number: begun.append(number))
    turnstile.enter(lambda: begun.append("late"))
    await asyncio.sleep(0)
    assert begun == [*range(MOST_A_TURN + 1), "late"]
    for _ in range(2):  # in the turn after the next no call has begun
        await asyncio.sleep(0)
    turnstile.enter(lambda: begun.append("alone"))
    assert begun[-1] == "alone"


async def test_waiting_calls_begin_by_importance_and_then_by_turns_of_callers() -> None:
    turnstile, begun = make_turnstile(), []
    for number in range(MOST_A_TURN):
        turnstile.enter(lambda number=number: begun.append(number))
    assert turnstile.busy
    for number in range(10):
        turnstile.enter(lambda number=number: begun.append(f"many {number}"), Rank(caller="many"))
    for name, priority in (("few 0", 0), ("few 1", 0), ("last", -1), ("first", 5)):
        turnstile.enter(lambda name=name: begun.append(name), Rank(priority, "few"))
    for _ in range(14):
        await asyncio.sleep(0)
    assert len(begun) == MOST_A_TURN + 14
    late = [name for name in begun[MOST_A_TURN:] if not str(name).startswith("many")]
    assert late == ["first", "few 0", "few 1", "last"]
    assert begun.index("few 1") < begun.index("many 3")
    assert begun[-1] == "last"
    assert not turnstile._known._waiting  # nobody is remembered who does not wait


async def test_a_new_caller_begins_in_the_next_turn_however_many_have_many_calls() -> None:
    turnstile, begun = make_turnstile(), []
    for caller in range(300):
        for _ in range(64):
            turnstile.enter(lambda caller=caller: begun.append(caller), Rank(caller=caller))
    await asyncio.sleep(0)
    turnstile.enter(lambda: begun.append("new"), Rank(caller="new"))
    await asyncio.sleep(0)
    assert "new" in begun
    while len(begun) < 2 * 300:  # meanwhile the other callers have their turns, the oldest one, too
        turnstile.enter(lambda: begun.append("new"), Rank(caller=f"new {len(begun)}"))
        await asyncio.sleep(0)
    assert set(range(100)) < set(begun)
    while turnstile.waiting:
        await asyncio.sleep(0)
    assert begun.count("new") + 300 * 64 == len(begun)
    assert not turnstile._known._waiting
    assert not turnstile._known._new  # nobody is remembered who does not wait


async def test_a_tenant_with_several_calls_waits_behind_no_crowd_of_strangers() -> None:
    turnstile, begun = make_turnstile(), []
    for caller in range(300):
        for _ in range(64):
            turnstile.enter(lambda: begun.append("stranger"), Rank(caller=caller, stranger=True))
    for _ in range(3):
        turnstile.enter(lambda: begun.append("tenant"), Rank(-1, "tenant"))
    await asyncio.sleep(0)
    assert begun.count("tenant") == 3  # although the strangers' calls have a higher priority
    assert begun.count("stranger") == 2 * MOST_A_TURN - 3


async def test_of_strangers_one_with_a_call_goes_before_those_who_keep_bringing_many() -> None:
    turnstile, begun = make_turnstile(), []

    def bring(caller: str) -> None:
        for number in range(64):
            turnstile.enter(lambda: begun.append("many"), Rank(caller=caller, stranger=True, many=number > 1))

    bring("first")
    turnstile.enter(lambda: begun.append("one"), Rank(caller="one", stranger=True))
    for number in range(20):
        bring(f"late {number}")
    await asyncio.sleep(0)
    assert "one" in begun[: MOST_A_TURN + 2]


async def test_who_leaves_holds_up_nobody_and_is_forgotten_at_once() -> None:
    turnstile, begun = make_turnstile(), []
    for number in range(MOST_A_TURN):
        assert turnstile.enter(lambda number=number: begun.append(number)) is None
    places = [
        turnstile.enter(lambda: begun.append("gone"), Rank(1, f"caller {number % 7}")) for number in range(10_000)
    ]
    turnstile.enter(lambda: begun.append("here"))
    assert turnstile.waiting == 10_001
    for place in places:
        place.leave()
        place.leave()
    assert turnstile.waiting == 1
    await asyncio.sleep(0)
    assert begun[MOST_A_TURN:] == ["here"]
    assert not turnstile.busy
    for place in places:
        place.leave()


async def test_a_few_that_wait_go_on_in_each_turn_and_one_that_is_cancelled_takes_no_turn() -> None:
    turnstile, gone_on = Turnstile(), []

    async def wait(number: int) -> None:
        await turnstile.wait()
        gone_on.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(3 * MOST_A_TURN)]
    await asyncio.sleep(0)
    assert len(gone_on) == MOST_A_TURN
    for task in tasks[MOST_A_TURN:-1]:
        task.cancel()
    await tasks[-1]
    assert gone_on == [*range(MOST_A_TURN), 3 * MOST_A_TURN - 1]
    assert turnstile.waiting == 0
