"""OpenAI's official client over what it has for chats, completions, responses, embeddings and models; and over all else, which is
refused with a reason."""

import json

import openai
import pydantic
import pytest

HI = [{"role": "user", "content": "hi"}]
HEARD = "<user>hi<assistant>"
MODEL = {"model": "fake"}


class City(pydantic.BaseModel):
    city: str


class Weather(pydantic.BaseModel):
    """The weather in a city."""

    city: str


@pytest.fixture
async def cluster(make_cluster):
    async with make_cluster(workers=1) as running:
        yield running


@pytest.fixture
def client(cluster):
    return cluster.openai


async def test_chats_in_every_way_that_the_client_has(cluster, client) -> None:
    chats = client.chat.completions
    assert (await chats.create(**MODEL, messages=HI)).choices[0].message.content == HEARD
    raw = await chats.with_raw_response.create(**MODEL, messages=HI)
    assert raw.headers["x-request-id"] and raw.parse().choices[0].message.content == HEARD
    async with chats.with_streaming_response.create(**MODEL, messages=HI) as streaming:
        assert (await streaming.parse()).choices[0].message.content == HEARD
    stream = await chats.create(**MODEL, messages=HI, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == HEARD
    assert chunks[-1].usage.total_tokens == 40
    async with chats.stream(**MODEL, messages=HI) as helper:
        kinds = [event.type async for event in helper]
        final = await helper.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= {*kinds}
    assert final.choices[0].message.content == HEARD


async def test_chats_are_parsed_as_types(cluster, client) -> None:
    cluster.answer_with('{"city":"Rome"}')
    parsed = await client.chat.completions.parse(**MODEL, messages=HI, response_format=City)
    assert parsed.choices[0].message.parsed == City(city="Rome")
    assert json.loads(cluster.tokenizer.grammars[-1].grammar.json_schema)["required"] == ["city"]
    cluster.answer_with('<call Weather>{"city":"Oslo"}</call>')
    parsed = await client.chat.completions.parse(
        **MODEL, messages=HI, tools=[openai.pydantic_function_tool(Weather)], tool_choice="required"
    )
    assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Oslo")
    async with client.chat.completions.stream(
        **MODEL, messages=HI, tools=[openai.pydantic_function_tool(Weather)]
    ) as helper:
        done = [event async for event in helper if event.type == "tool_calls.function.arguments.done"]
    assert done[0].parsed_arguments == Weather(city="Oslo")


async def test_a_chat_that_was_cut_cannot_be_parsed(cluster, client) -> None:
    cluster.answer_with('{"city":"Rome"}')
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(**MODEL, messages=HI, response_format=City, max_completion_tokens=3)


async def test_completions_and_embeddings(client) -> None:
    assert (await client.completions.create(**MODEL, prompt=["hi", "ho"], n=2)).choices[3].text == "ho"
    stream = await client.completions.create(**MODEL, prompt="hi", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hi"
    raw = await client.completions.with_raw_response.create(**MODEL, prompt="hi", logprobs=1)
    assert raw.parse().choices[0].logprobs.tokens == ["h", "i"]
    floats = await client.embeddings.create(**MODEL, input=["ab", [5, 6]], encoding_format="float")
    coded = await client.embeddings.create(**MODEL, input=["ab", [5, 6]])  # the client asks for base64
    assert [each.embedding for each in floats.data] == [each.embedding for each in coded.data]


async def test_models(client) -> None:
    assert [model.id async for model in client.models.list()] == ["fake"]
    assert (await client.models.retrieve("fake")).object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("none")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as refused:
        await client.models.delete("fake")
    assert refused.value.status_code == 405


async def test_responses_in_every_way_that_the_client_has(cluster, client) -> None:
    responses = client.responses
    first = await responses.create(**MODEL, input="hi")
    assert first.output_text == HEARD
    raw = await responses.with_raw_response.create(**MODEL, input="hi", previous_response_id=first.id)
    assert raw.parse().status == "completed"
    events = [event.type async for event in await responses.create(**MODEL, input="hi", stream=True)]
    assert (events[0], events[-1]) == ("response.created", "response.completed")
    async with responses.stream(**MODEL, input="hi") as helper:
        final = await helper.get_final_response()
    assert final.output_text == HEARD
    cluster.answer_with('{"city":"Rome"}')
    assert (await responses.parse(**MODEL, input="hi", text_format=City)).output_parsed == City(city="Rome")
    async with responses.stream(**MODEL, input="hi", text_format=City) as helper:
        assert (await helper.get_final_response()).output_parsed == City(city="Rome")
    cluster.answer_with('<call Weather>{"city":"Oslo"}</call>')
    tool = {"type": "function", **openai.pydantic_function_tool(Weather)["function"]}
    called = await responses.parse(**MODEL, input="hi", tools=[tool])
    assert called.output[0].parsed_arguments in (Weather(city="Oslo"), {"city": "Oslo"})
    assert (await responses.retrieve(first.id)).id == first.id
    assert len((await responses.input_items.list(first.id)).data) == 1
    assert (await responses.input_tokens.count(**MODEL, input="hi")).input_tokens == 20
    assert (await responses.compact(**MODEL, input="hi")).object == "response.compaction"
    with pytest.raises(openai.BadRequestError):
        await responses.cancel(first.id)
    await responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        await responses.create(**MODEL, input="hi", conversation="conv_1")


UNSERVED = {
    "uploads": lambda client: client.uploads.create(bytes=1, filename="x", mime_type="text/plain", purpose="batch"),
    "vector stores": lambda client: client.vector_stores.list(),
    "containers": lambda client: client.containers.list(),
    "images": lambda client: client.images.generate(prompt="x"),
    "an image": lambda client: client.images.edit(image=b"x", prompt="x"),
    "videos": lambda client: client.videos.list(),
    "speech": lambda client: client.audio.speech.create(input="x", model="x", voice="alloy"),
    "a transcription": lambda client: client.audio.transcriptions.create(file=b"x", model="x"),
    "moderations": lambda client: client.moderations.create(input="x"),
    "fine-tuning": lambda client: client.fine_tuning.jobs.list(),
    "evals": lambda client: client.evals.list(),
    "assistants": lambda client: client.beta.assistants.list(),
    "threads": lambda client: client.beta.threads.create(),
    "a kept chat": lambda client: client.chat.completions.retrieve("x"),
    "its messages": lambda client: client.chat.completions.messages.list("x"),
    **{
        path: lambda client, path=path: client.get(f"/{path}", cast_to=object)
        for path in (
            *(
                "agents",
                "agents/sessions",
                "chatkit/threads",
                "content_provenance_checks",
                "decisions",
                "live/sessions",
            ),
            *(
                "organization/projects",
                "projects",
                "realtime",
                "safety/alerts",
                "skills",
                "vaults",
                "webhook_endpoints",
            ),
            "webhook_event_types",
        )
    },
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", UNSERVED)
async def test_what_is_not_served_is_refused_with_a_reason(client, name) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await UNSERVED[name](client)
    assert caught.value.type == "invalid_request_error"
    said = caught.value.body["message"]
    assert said.startswith("there is no /v1/")
    assert ": " in said, "a reason"


async def test_kept_chats_cannot_be_listed(client) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.list()
    assert caught.value.status_code == 405
    assert caught.value.body["message"].startswith(
        "/v1/chat/completions takes POST, not GET: chat completions are not kept"
    )


async def test_errors_are_the_classes_that_the_client_has(client) -> None:
    for wrong, kind in (
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "none"}, openai.NotFoundError),
        ({"tool_choice": "required"}, openai.BadRequestError),
    ):
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(**{**MODEL, "messages": HI, **wrong})
        assert caught.value.param == next(iter(wrong))
        assert caught.value.request_id
