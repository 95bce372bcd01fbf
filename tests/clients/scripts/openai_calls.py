"""The ordinary calls of the official ``openai`` client: ``python openai_calls.py http://127.0.0.1:8000/v1``."""

import asyncio
import sys
from typing import Any, Literal

import openai
from calls import call, run_all
from pydantic import BaseModel

WHERE: dict[str, Any] = {"base_url": sys.argv[1], "api_key": "none", "max_retries": 0, "timeout": 300}
client = openai.OpenAI(**WHERE)
HELLO = {"role": "user", "content": "Say hello."}
MESSAGES = [{"role": "system", "content": "You are brief."}, HELLO]
SHORT: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 3, "temperature": 0}
LONG = {**SHORT, "max_tokens": 64}
TEXT: dict[str, Any] = {"model": "demo", "max_tokens": 3, "temperature": 0}
chat, completions = client.chat.completions, client.completions


class Colour(BaseModel):
    """What the structured answer is."""

    name: Literal["red", "green", "blue"]


class Weather(BaseModel):
    """Tells the weather."""

    city: Literal["Rome", "Paris"]


class Time(BaseModel):
    """Tells the time."""

    city: Literal["Rome", "Paris"]


TOOLS = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Time)]
NAMED = {"type": "function", "function": {"name": "Weather"}}


@call
def an_answer_with_every_usual_parameter() -> None:
    asked = {key: value for key, value in SHORT.items() if key != "max_tokens"}
    answer = chat.create(
        **asked, max_completion_tokens=3, seed=1, user="me", stop=["\n\n"], n=2, logprobs=True, top_logprobs=2, top_p=0.9,
        presence_penalty=0.1, frequency_penalty=0.1, logit_bias={"5": 1}, reasoning_effort="low", verbosity="low",
        modalities=["text"], store=True, metadata={"a": "b"}, service_tier="auto", prompt_cache_key="k",
        safety_identifier="s", response_format={"type": "text"}, tools=[], parallel_tool_calls=True,
    )  # fmt: skip
    assert len(answer.choices) == 2
    assert all(len(choice.logprobs.content[0].top_logprobs) == 2 for choice in answer.choices)


@call
def parameters_of_other_servers() -> None:
    body = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "guided_choice": ["yes", "no"],
        "use_beam_search": False,
    }
    answer = chat.create(**SHORT, extra_body=body)
    assert answer.choices[0].message.content in ("yes", "no")


@call
def a_stream_with_usage() -> None:
    chunks = list(chat.create(**SHORT, n=2, logprobs=True, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 6
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


@call
def a_structured_stream() -> None:
    with chat.stream(**LONG, response_format=Colour) as events:
        events.until_done()
        assert events.get_final_completion().choices[0].message.parsed.name in ("red", "green", "blue")


@call
def a_structured_answer() -> None:
    assert chat.parse(**LONG, response_format=Colour).choices[0].message.parsed.name in ("red", "green", "blue")


@call
def any_json() -> None:
    assert chat.create(**SHORT, response_format={"type": "json_object"}).choices[0].message.content.startswith("{")


@call
def tools_if_the_model_likes() -> None:
    for choice in ("auto", "none", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}):
        assert chat.create(**SHORT, tools=TOOLS, tool_choice=choice).choices


@call
def a_tool_is_called_and_answered() -> None:
    message = chat.parse(**LONG, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message
    (made,) = message.tool_calls
    assert isinstance(made.function.parsed_arguments, (Weather, Time))
    result = {"role": "tool", "tool_call_id": made.id, "content": [{"type": "text", "text": "rain"}]}
    again = [*MESSAGES, message.model_dump(exclude={"parsed"}), result, {"role": "user", "content": "So?"}]
    assert chat.create(**{**SHORT, "messages": again}, tools=TOOLS).choices


@call
def a_named_tool_is_streamed() -> None:
    chunks = list(chat.create(**LONG, tools=TOOLS, tool_choice=NAMED, stream=True))
    calls = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or ()]
    assert calls[0].function.name == "Weather"
    Weather.model_validate_json("".join(part.function.arguments or "" for part in calls))
    assert chunks[-1].choices[0].finish_reason in ("stop", "tool_calls")


@call
def a_conversation_with_turns_of_every_kind() -> None:
    turns = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "name": "bob", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None, "audio": None, "function_call": None},
        HELLO,
        {"role": "assistant", "content": "He"},
    ]
    assert chat.create(**{**SHORT, "messages": turns}).choices


@call
def completions_of_every_kind() -> None:
    answer = completions.create(
        **TEXT, prompt=["The capital of France is", "Once"], logprobs=2, echo=True, best_of=2, stop=["x"], seed=3, user="u",
        suffix=None, logit_bias={"5": 1}, presence_penalty=0, frequency_penalty=0, n=1,
    )  # fmt: skip
    assert answer.choices[0].text.startswith("The capital of France is")
    assert answer.choices[1].logprobs.token_logprobs[-1] <= 0
    assert completions.create(**TEXT, prompt=[2, 818, 5279], logprobs=0).choices[0].text
    chunks = completions.create(**TEXT, prompt="Once", stream=True, stream_options={"include_usage": True})
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [3]


@call
def embeddings_of_every_kind() -> None:
    for asked in ({"input": ["a", "b"]}, {"input": [[5, 6], [7]]}, {"input": ["a", "b"], "encoding_format": "float"}):
        found = client.embeddings.create(model="demo", **asked, user="u").data
        assert [len(item.embedding) for item in found] == [640, 640]


@call
def responses() -> None:
    asked: dict[str, Any] = {"model": "demo", "max_output_tokens": 16, "temperature": 0}
    first = client.responses.create(**asked, input="Say hello.", instructions="You are brief.")
    assert first.output_text
    assert first.usage.output_tokens <= 16
    again = client.responses.create(**asked, input="And again.", previous_response_id=first.id)
    assert again.usage.input_tokens > first.usage.input_tokens
    events = [event.type for event in client.responses.create(**asked, input="Say hello.", stream=True, store=False)]
    assert events[0] == "response.created"
    assert events[-1] in ("response.completed", "response.incomplete")


@call
def models() -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").max_model_len > 0


@call
def raw_answers() -> None:
    assert chat.with_raw_response.create(**SHORT).headers["x-request-id"]
    with chat.with_streaming_response.create(**SHORT, stream=True) as response:
        assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]


@call
def many_at_once() -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(**WHERE) as asynchronous:
            create = asynchronous.chat.completions.create
            answers = await asyncio.gather(*(create(**SHORT) for _ in range(4)))
            assert all(answer.choices for answer in answers)
            assert [chunk async for chunk in await create(**SHORT, stream=True)]

    asyncio.run(ask())


@call
def impatience_and_mistakes_are_told_plainly() -> None:
    def expect(*kinds: type[openai.OpenAIError], **asked: Any) -> openai.OpenAIError:
        try:
            chat.create(**{**SHORT, **asked})
        except kinds as error:
            return error
        raise AssertionError(f"{asked} is not refused")

    try:  # a stream's head may come within that, all of it does not
        for _ in chat.create(**SHORT | {"timeout": 0.01, "max_tokens": 500, "stream": True}):
            pass
    except Exception as error:  # openai's before the head, that of its HTTP library after
        assert "Timeout" in type(error).__name__, error
    else:
        raise AssertionError("it waited for 500 tokens")
    # Of an answer in one piece the client says how long it waits: the 504 may come before it has left.
    expect(openai.APITimeoutError, openai.InternalServerError, timeout=0.01, max_tokens=500)
    expect(openai.NotFoundError, model="gpt-4o")
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    assert expect(openai.BadRequestError, messages=image).param == "messages[0].content[0]"
    assert expect(openai.BadRequestError, web_search_options={}).param == "web_search_options"
    try:
        client.moderations.create(model="demo", input="hi")
    except openai.NotFoundError as error:
        assert "/v1/moderations" in str(error)
    else:
        raise AssertionError("there is no such API")


run_all()
