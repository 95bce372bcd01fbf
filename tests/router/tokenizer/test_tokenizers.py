"""Models behind one router, each with a tokenizer of its own."""

import asyncio
import contextlib

import pytest

from sapwood.v1 import router_pb2
from sapwood_router.config import RouterConfig
from sapwood_testing.router.fake_tokenizer import FakeTokenizer, encode
from sapwood_testing.router.fake_worker import FakeWorker

OFFSET = 40


@pytest.fixture
async def two(make_cluster, wait_until):
    """A cluster in which model "other" has another vocabulary."""
    async with contextlib.AsyncExitStack() as stack:
        own, worker = FakeTokenizer(OFFSET), FakeWorker("other")
        worker.script.tokens = lambda prompt: encode("other", OFFSET)[1:]
        for service in (own, worker):
            await service.start()
            stack.push_async_callback(service.kill)
        cluster = await stack.enter_async_context(make_cluster(1, model_tokenizers=(f"other={own.address}",)))
        cluster.workers[0].script.tokens = lambda prompt: encode("usual")[1:]
        await cluster.stub.RegisterWorker(router_pb2.RegisterWorkerRequest(address=worker.address))
        await wait_until(lambda: "other" in cluster.router.registry.models())
        yield cluster, own, worker


def told(worker: FakeWorker) -> list[int]:
    return list(worker.calls[-1].request.token_ids)


async def test_each_models_prompts_and_answers_are_its_own_tokenizers(two) -> None:
    cluster, _, other = two
    for model, worker, offset in (("fake", cluster.workers[0], 3), ("other", other, OFFSET)):
        answer = await cluster.openai.completions.create(model=model, prompt="hi", max_tokens=9, logprobs=0)
        assert answer.choices[0].text == {"fake": "usual", "other": "other"}[model]
        assert "".join(answer.choices[0].logprobs.tokens) == answer.choices[0].text
        assert told(worker) == encode("hi", offset)
        chat = await cluster.openai.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
        assert chat.choices[0].message.content == answer.choices[0].text


async def test_who_names_no_model_has_the_only_ones_tokenizer(make_cluster) -> None:
    own = FakeTokenizer(OFFSET)
    await own.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(own.kill)
        cluster = await stack.enter_async_context(make_cluster(1, model_tokenizers=(f"fake={own.address}",)))
        cluster.workers[0].script.tokens = lambda prompt: encode("own", OFFSET)[1:]
        for named in ({}, {"model": ""}):
            answer = await cluster.http.post("/v1/completions", json={"prompt": "hi", **named})
            assert answer.json()["choices"][0]["text"] == "own"
            assert told(cluster.workers[0]) == encode("hi", OFFSET)


async def test_while_one_models_tokenizer_is_gone_the_others_are_served(two) -> None:
    cluster, own, _ = two
    await own.kill()
    asked = asyncio.ensure_future(cluster.openai.completions.create(model="other", prompt="hi", max_tokens=9))
    answer = await cluster.openai.completions.create(model="fake", prompt="hi", max_tokens=9)
    assert answer.choices[0].text == "usual"
    assert not asked.done()
    assert (await cluster.http.get("/health")).status_code == 200
    await own.start()
    assert (await asked).choices[0].text == "other"


@pytest.mark.parametrize("given", ["127.0.0.1:50052", "m=", "m=host", "=127.0.0.1:1", "m=127.0.0.1:1,host"])
def test_what_is_no_model_and_address_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="MODEL=HOST:PORT"):
        RouterConfig(model_tokenizers=(given,))
