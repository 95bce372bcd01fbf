"""Conversations and kept responses by OpenAI's client: over a restart of the router, and over two routers with one store."""

from __future__ import annotations

import asyncio

import openai
import pytest

from sapwood_common.errors import NotFoundError
from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_router.edges.responses import store as kept
from sapwood_router.store import sql

HELLO = {"type": "message", "role": "user", "content": "hello"}


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow), "redis"])
def url(request, tmp_path) -> str:
    if request.param != "sqlite":
        return request.getfixturevalue(f"{request.param}_url")
    return f"sqlite:{tmp_path}/store.sqlite"


async def test_a_conversation_is_made_shown_changed_and_forgotten(make_cluster) -> None:
    async with make_cluster(1) as cluster:
        client = cluster.openai.conversations
        made = await client.create(items=[HELLO], metadata={"topic": "demo"})
        assert (made.object, made.metadata) == ("conversation", {"topic": "demo"})
        assert await client.retrieve(made.id) == made
        changed = await client.update(made.id, metadata={"topic": "other"})
        assert (changed.metadata, changed.created_at) == ({"topic": "other"}, made.created_at)
        added = await client.items.create(made.id, items=[{**HELLO, "content": "again"}, {**HELLO, "content": "more"}])
        assert [item.content[0].text for item in added.data] == ["again", "more"]
        page = await client.items.list(made.id, order="asc", limit=2)
        texts = [item.content[0].text async for item in page]
        assert texts == ["hello", "again", "more"]
        one = await client.items.retrieve(added.data[0].id, conversation_id=made.id)
        assert one == added.data[0]
        await client.items.delete(one.id, conversation_id=made.id)
        assert [item.content[0].text async for item in await client.items.list(made.id)] == ["more", "hello"]
        gone = await client.delete(made.id)
        assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
        for call in (
            client.retrieve(made.id),
            client.items.list(made.id),
            client.items.retrieve(one.id, conversation_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call


async def test_a_wrong_request_for_a_conversation_names_the_field(make_cluster) -> None:
    async with make_cluster(1) as cluster:
        made = await cluster.openai.conversations.create()
        path = "/v1/conversations"
        for where, body, param in (
            (path, {"items": [HELLO] * 21}, "items"),
            (path, {"items": [{"type": "message", "role": "robot", "content": "x"}]}, "items[0].role"),
            (path, {"metadata": {"a": "b" * 513}}, "metadata"),
            (f"{path}/{made.id}/items", {}, "items"),
            (
                "/v1/responses",
                {"input": "x", "conversation": made.id, "previous_response_id": "r"},
                "previous_response_id",
            ),
        ):
            answer = await cluster.http.post(where, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        answer = await cluster.http.post("/v1/responses", json={"input": "x", "conversation": "conv_none"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "conversation")
        assert (await cluster.http.get(f"{path}/{made.id}/other")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_read_a_conversation_and_add_their_items(make_cluster, stream) -> None:
    async with make_cluster(1) as cluster:
        cluster.answer_with("Hey.")
        made = await cluster.openai.conversations.create(items=[{**HELLO, "role": "system", "content": "Be kind."}])
        for said in ("one", "two"):
            answer = await cluster.openai.responses.create(
                model="fake", input=said, conversation=made.id, stream=stream
            )
            if stream:
                answer = [event async for event in answer][-1].response
            assert answer.conversation.id == made.id
        seen = [(turn.role, turn.content) for turn in cluster.tokenizer.chats[-1].messages]
        assert seen == [("system", "Be kind."), ("user", "one"), ("assistant", "Hey."), ("user", "two")]
        listed = [item async for item in await cluster.openai.conversations.items.list(made.id, order="asc")]
        assert [item.content[0].text for item in listed] == ["Be kind.", "one", "Hey.", "two", "Hey."]
        assert len({item.id for item in listed}) == 5


async def test_everything_kept_outlives_the_router(make_cluster, url) -> None:
    async with make_cluster(1, store=url) as cluster:
        cluster.answer_with("Hey.")
        first = await cluster.openai.responses.create(model="fake", input="one")
        made = await cluster.openai.conversations.create(items=[HELLO])
        background = await cluster.openai.responses.create(
            model="fake", input="later", conversation=made.id, background=True
        )
        async with asyncio.timeout(60):
            while (await cluster.openai.responses.retrieve(background.id)).status != "completed":
                await asyncio.sleep(0.01)
    async with make_cluster(1, store=url) as cluster:
        assert await cluster.openai.responses.retrieve(first.id) == first
        await cluster.openai.responses.create(model="fake", input="two", previous_response_id=first.id)
        seen = [turn.content for turn in cluster.tokenizer.chats[-1].messages]
        assert seen == ["one", "Hey.", "two"]
        await cluster.openai.responses.create(model="fake", input="three", conversation={"id": made.id})
        seen = [turn.content for turn in cluster.tokenizer.chats[-1].messages]
        assert seen == ["hello", "later", "Hey.", "three"]
        await cluster.openai.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await cluster.openai.responses.retrieve(first.id)


async def test_two_routers_with_one_store_continue_each_others_answers(make_cluster, url) -> None:
    async with make_cluster(1, store=url) as one, make_cluster(1, store=url) as other:
        one.answer_with("Hey.")
        first = await one.openai.responses.create(model="fake", input="one")
        second = await other.openai.responses.create(model="fake", input="two", previous_response_id=first.id)
        await one.openai.responses.create(model="fake", input="three", previous_response_id=second.id)
        assert [turn.content for turn in one.tokenizer.chats[-1].messages][::2] == ["one", "two", "three"]


async def test_conversations_of_other_tenants_are_not_there(make_cluster, tmp_path, url) -> None:
    keys = {name: make_key() for name in ("alice", "bob")}
    path = tmp_path / "keys"
    path.write_text("".join(f"{name} {hash_key(key)}\n" for name, key in keys.items()))
    async with make_cluster(1, api_keys=path, store=url) as cluster:
        alice, bob = (cluster.openai.with_options(api_key=keys[name]) for name in keys)
        made = await alice.conversations.create(items=[HELLO])
        (item,) = (await alice.conversations.items.list(made.id)).data
        for call in (
            bob.conversations.retrieve(made.id),
            bob.conversations.delete(made.id),
            bob.conversations.update(made.id, metadata={}),
            bob.conversations.items.list(made.id),
            bob.conversations.items.retrieve(item.id, conversation_id=made.id),
            bob.conversations.items.create(made.id, items=[HELLO]),
            bob.responses.create(model="fake", input="x", conversation=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert (await alice.conversations.retrieve(made.id)).id == made.id


async def test_a_response_in_the_background_is_made_again_by_the_next_router(make_cluster, url, wait_until) -> None:
    async with make_cluster(1, store=url) as cluster:
        cluster.workers[0].script.gate = asyncio.Event()
        made = await cluster.openai.conversations.create(items=[HELLO])
        begun = await cluster.openai.responses.create(
            model="fake", input="later", conversation=made.id, background=True
        )
        await wait_until(lambda: len(cluster.calls()) == 1)
    answer = "<user>hello<user>later<assistant>"  # the prompt again, as workers here answer
    async with make_cluster(1, store=url) as cluster:
        async with asyncio.timeout(60):
            while (found := await cluster.openai.responses.retrieve(begun.id)).status != "completed":
                assert found.status in ("queued", "in_progress")
                await asyncio.sleep(0.05)
        assert (found.id, found.output_text, found.background) == (begun.id, answer, True)
        items = [item async for item in await cluster.openai.conversations.items.list(made.id, order="asc")]
        assert [item.content[0].text for item in items] == ["hello", "later", answer]
        assert await cluster.router._store.every("rerun") == []


async def test_a_response_in_the_background_is_cancelled_by_another_router(make_cluster, url, wait_until) -> None:
    async with make_cluster(1, store=url) as one, make_cluster(1, store=url) as other:
        one.workers[0].script.gate = asyncio.Event()
        begun = await one.openai.responses.create(model="fake", input="later", background=True)
        await wait_until(lambda: len(one.calls()) == 1)
        assert (await other.openai.responses.cancel(begun.id)).status == "cancelled"
        await wait_until(lambda: one.calls()[0].outcome == "cancelled")
        assert (await one.openai.responses.retrieve(begun.id)).status == "cancelled"


async def test_a_conversation_of_more_bytes_than_a_request_may_have_is_listed_in_pages_and_not_gone_on_from(
    make_cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sql, kept):
        monkeypatch.setattr(module, "MOST_AT_ONCE", 10_000)
    async with make_cluster(1, store="memory") as cluster:
        client = cluster.openai
        texts = [str(number) * 4000 for number in range(8)]
        made = await client.conversations.create(items=[{**HELLO, "content": text} for text in texts])
        items = client.conversations.items
        first = await items.list(made.id, order="asc", limit=100)
        assert len(first.data) == 3 and first.has_more
        assert [item.content[0].text async for item in first] == texts
        assert [item.content[0].text async for item in await items.list(made.id, limit=2)] == texts[::-1]
        with pytest.raises(openai.BadRequestError, match="more than 10000 bytes") as caught:
            await client.responses.create(model="fake", input="go", conversation=made.id)
        assert caught.value.param == "conversation"
        with pytest.raises(openai.NotFoundError):
            await items.list(made.id, after="msg_x")

        cluster.answer_with("ok")
        last = await client.responses.create(model="fake", input="x" * 2000)
        last = await client.responses.create(model="fake", input="x" * 2000, previous_response_id=last.id)
        with pytest.raises(openai.BadRequestError, match="more than 10000 bytes") as caught:
            await client.responses.create(model="fake", input="go", previous_response_id=last.id)
        assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("keeps", [True, False])
async def test_an_answer_leaves_nothing_of_a_conversation_that_is_forgotten_meanwhile(
    make_cluster, url, wait_until, keeps
) -> None:
    async with make_cluster(1, store=url) as cluster:
        store, script = cluster.router._store, cluster.workers[0].script
        made = await cluster.openai.conversations.create(items=[HELLO])
        script.gate = asyncio.Event()
        asked = asyncio.create_task(
            cluster.openai.responses.create(model="fake", input="x" * 1000, conversation=made.id, store=keeps)
        )
        await wait_until(lambda: any(call.outcome == "running" for call in cluster.calls()))
        await cluster.openai.conversations.delete(made.id)
        script.gate.set()
        assert (await asked).status == "completed"
        assert await store.every("item") == []


async def test_what_is_changed_while_it_is_forgotten_does_not_come_back(make_cluster) -> None:
    async with make_cluster(1) as cluster:
        store = cluster.router._store
        conversations = kept.ConversationStore(store)
        await conversations.create("t", "c", b"1")

        def late(known: bytes) -> bytes:
            asyncio.get_running_loop().create_task(store.delete("conversation", "t", "c"))
            return b"2"

        with pytest.raises(NotFoundError):
            while True:
                await conversations.change("t", "c", late)
        assert await store.get("conversation", "t", "c") is None
        assert not await conversations.add("t", "c", [{"id": "i"}])
