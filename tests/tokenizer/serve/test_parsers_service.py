"""Tool calls and reasoning through ``python -m sapwood_tokenizer``, a process of its own."""

import contextlib
import json
import re
import subprocess
import sys

import grpc
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sapwood.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from sapwood_common.network.channel import open_channel

EOS = "<|im_end|>"
SPECIAL = [
    EOS,
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
]
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TOOLS = '[{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}}]'
KIMI = (
    "<think>Hm.</think>I call.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"x": "é"}<|tool_call_end|><|tool_calls_section_end|>' + EOS
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level, one token a byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": TEMPLATE}))
    return str(folder)


@contextlib.contextmanager
def service(*flags: str, logged: list[str] | None = None):
    """A running service; gives its address. What it logs from then on is appended to ``logged`` as it ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sapwood_tokenizer", "--port", "0", *flags], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"listening on (127\.0\.0\.1:\d+)", line):
                yield found[1]
                return
        pytest.fail("".join(lines))
    finally:
        process.terminate()
        rest = process.communicate()[1]
        if logged is not None:
            logged.append(rest)


@pytest.fixture(scope="module")
def address(model):
    with service("--model", model) as running:
        yield running


@pytest.fixture
async def stub(address):
    async with open_channel(address) as channel:
        yield tokenizer_pb2_grpc.TokenizerStub(channel)


async def detokenize(stub, inputs):
    """Sends each input in a message of its own; returns the outputs of each stream."""

    async def requests():
        for item in inputs:
            yield tokenizer_pb2.DetokenizeRequest(inputs=[item])

    outputs: dict[int, list[tokenizer_pb2.DetokenizeOutput]] = {}
    async for response in stub.Detokenize(requests()):
        for output in response.outputs:
            outputs.setdefault(output.stream_id, []).append(output)
    return outputs


def stream_of(tokenizer, stream_id, text, step, **options):
    """The inputs of one stream, ``step`` tokens each."""
    ids = tokenizer.encode(text).ids
    pieces = [ids[at : at + step] for at in range(0, len(ids), step)]
    inputs = [tokenizer_pb2.DetokenizeInput(stream_id=stream_id, token_ids=piece) for piece in pieces]
    inputs[0].options.CopyFrom(tokenizer_pb2.DetokenizeOptions(**options))
    inputs[-1].end = True
    return inputs


def joined(outputs):
    """Text, reasoning and calls of one stream."""
    calls: dict[int, list[str]] = {}
    for output in outputs:
        for delta in output.tool_calls:
            call = calls.setdefault(delta.index, ["", "", ""])
            call[0] += delta.id
            call[1] += delta.name
            call[2] += delta.arguments
    text = "".join(output.text for output in outputs)
    return text, "".join(output.reasoning for output in outputs), [tuple(calls[index]) for index in sorted(calls)]


@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_a_stream_is_parsed_however_its_tokens_come(stub, tokenizer, step):
    harmony = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>"
        '{"x": "é"}<|call|>'
    )
    hermes = 'Hi <tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>' + EOS
    outputs = await detokenize(
        stub,
        [
            *stream_of(tokenizer, 1, KIMI, step, tool_parser="kimi_k2", reasoning_parser="kimi_k2"),
            *stream_of(tokenizer, 2, harmony, step, tool_parser="gpt_oss", tool_call_id_seed="s"),
            *stream_of(tokenizer, 3, hermes, step, tool_parser="hermes", tool_call_id_seed="s"),
            *stream_of(tokenizer, 4, hermes, step),
            *stream_of(tokenizer, 5, "Hm.</think> A", step, reasoning_parser="qwen3", reasoning_open=True),
            *stream_of(tokenizer, 6, hermes, step, tool_parser="hermes", stop=['"x"']),
        ],
    )
    assert joined(outputs[1]) == ("I call.", "Hm.", [("functions.f:0", "f", '{"x": "é"}')])
    text, reasoning, [(call_id, name, arguments)] = joined(outputs[2])
    assert (text, reasoning, name, arguments) == ("", "Hm.", "f", '{"x": "é"}')
    assert joined(outputs[3]) == ("Hi", "", [(call_id, "f", '{"x": "</tool_call>"}')])
    assert joined(outputs[4]) == (hermes.removesuffix(EOS), "", [])
    assert joined(outputs[5]) == ("A", "Hm.", [])
    assert joined(outputs[6])[2][0][1:] == ("f", "{}")
    assert outputs[6][-1].stop_match == '"x"'
    assert all(stream[-1].ended for stream in outputs.values())
    assert outputs[1][-1].tokens_consumed == len(tokenizer.encode(KIMI).ids)


async def test_a_wrong_parser_name_ends_its_stream_only(stub, tokenizer):
    outputs = await detokenize(
        stub,
        [
            *stream_of(tokenizer, 1, "a", 1, tool_parser="nope"),
            *stream_of(tokenizer, 2, "a", 1, reasoning_parser="nope"),
            *stream_of(tokenizer, 3, "a", 1, tool_parser="hermes", reasoning_parser="gpt_oss"),
            *stream_of(tokenizer, 4, "a", 1, tools="{"),
            *stream_of(tokenizer, 5, "a", 1, tool_parser="hermes", tools=TOOLS),
        ],
    )
    invalid = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    fields = ["options.tool_parser", "options.reasoning_parser", "options.tool_parser", "options.tools"]
    for stream_id, field in enumerate(fields, start=1):
        (output,) = outputs[stream_id]
        assert (output.error.code, output.error.field, output.ended) == (invalid, field, True)
    assert "hermes" in outputs[1][0].error.message
    assert joined(outputs[5]) == ("a", "", [])


async def test_the_service_says_which_parsers_there_are_and_which_fit(stub, model):
    info = await stub.GetInfo(tokenizer_pb2.GetInfoRequest())
    assert {"hermes", "mistral", "gpt_oss"} <= set(info.tool_parsers)
    assert {"qwen3", "deepseek_r1", "gpt_oss"} <= set(info.reasoning_parsers)
    assert (info.tool_parser, info.reasoning_parser) == ("hermes", "qwen3")
    assert not info.hides_tools
    with service("--model", model, "--tool-parser", "mistral", "--reasoning-parser", "none") as address:
        async with open_channel(address) as channel:
            info = await tokenizer_pb2_grpc.TokenizerStub(channel).GetInfo(tokenizer_pb2.GetInfoRequest())
    assert (info.tool_parser, info.reasoning_parser) == ("mistral", "")


async def test_a_template_without_tools_is_told_and_logged_once(model, tmp_path):
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    logged = []
    with service("--model", model, "--chat-template", str(tmp_path / "plain.jinja"), logged=logged) as address:
        async with open_channel(address) as channel:
            stub = tokenizer_pb2_grpc.TokenizerStub(channel)
            assert (await stub.GetInfo(tokenizer_pb2.GetInfoRequest())).hides_tools
            messages = [common_pb2.ChatMessage(role="user", content="hi")]
            for tools in ("", TOOLS, TOOLS):
                asked = tokenizer_pb2.ApplyChatTemplateRequest(messages=messages, tools=tools)
                assert (await stub.ApplyChatTemplate(asked)).text == "hi"
    assert "".join(logged).count("the chat template does not show them") == 1


@pytest.mark.parametrize("flag", ["--tool-parser", "--reasoning-parser"])
def test_a_wrong_parser_flag_stops_the_start(model, flag):
    ended = subprocess.run(
        [sys.executable, "-m", "sapwood_tokenizer", "--port", "0", "--model", model, flag, "nope"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert f"{flag}: no parser 'nope'" in ended.stderr


async def test_a_conversation_with_tools_becomes_a_prompt(stub):
    user = common_pb2.ChatMessage(role="user", content="Hi")
    begun = common_pb2.ChatMessage(role="assistant", content="<think>So")
    broken = common_pb2.ChatMessage(role="assistant", tool_calls=[common_pb2.ToolCall(name="f", arguments="[")])
    request = tokenizer_pb2.ApplyChatTemplateRequest
    plain = await stub.ApplyChatTemplate(request(messages=[user], tools=TOOLS))
    assert plain.text.startswith('<tools>[{"type": "function"')
    assert plain.text.endswith("<|im_start|>assistant\n<think>\n")
    assert plain.reasoning_open
    continued = await stub.ApplyChatTemplate(request(messages=[user, begun], continue_final_message=True))
    assert continued.text.endswith("<|im_start|>assistant\n<think>So")
    assert continued.reasoning_open
    closed = await stub.ApplyChatTemplate(request(messages=[user], add_generation_prompt=False))
    assert not closed.HasField("reasoning_open")
    for wrong, field in [
        (request(messages=[user, broken]), "messages[1].tool_calls[0].arguments"),
        (request(messages=[user], tools="[5]"), "tools"),
        (
            request(messages=[user], continue_final_message=True, add_generation_prompt=True),
            "continue_final_message",
        ),
    ]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ApplyChatTemplate(wrong)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        details = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
        assert field.encode() in details
