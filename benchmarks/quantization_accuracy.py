"""What few bits cost in accuracy, on a real model: perplexity, divergence and agreement compared with the model in its own dtype.

The text is this project's documentation, which no model has seen. On a CPU the same roundings are computed in float32. Schemes
that round weights alone are tried by their numbers; all are rounded to the nearest but one: GPTQ, calibrated on other pages.
GGUF's K types are rounded by llama.cpp's library, where its package is installed (docs/gguf.md). Prints one JSON object a line.

    python benchmarks/quantization_accuracy.py --model demo --tokens 1500
"""

from __future__ import annotations

import argparse
import ctypes
import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.models.model_files import resolve_model
from sapwood_kernels.ops.factory import device_ops
from sapwood_testing.models import quantised_layers as layouts
from sapwood_testing.worker.steps import Part, step_for
from sapwood_tokenizer.vocab.loader import load_tokenizer, resolve_tokenizer
from sapwood_worker.model.families.decoder import DecoderModel
from sapwood_worker.model.layers.linear import Linear
from sapwood_worker.model.loader import load_model
from sapwood_worker.model.quantization.int8 import Int8Head
from sapwood_worker.model.quantization.linear_method import LinearShape
from sapwood_worker.model.quantization.linear_method import Part as LinearPart
from sapwood_worker.model.quantizer.layers import LayerRun
from sapwood_worker.model.quantizer.schemes import scheme
from sapwood_worker.model.runner.builder import build_runner
from sapwood_worker.model.runner.options import RunnerOptions
from sapwood_worker.model.weight_slot import whole

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "as its GGUF file stores it": {"stored_weights": "keep"},
    "fp8 KV cache": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8 linear": {"quantization": "fp8"},
    "fp8_block linear": {"quantization": "fp8_block"},
    "fp8_tensor linear": {"quantization": "fp8_tensor"},
    "fp8 linear and KV cache": {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
    "int8 linear": {"quantization": "int8"},
    "int4 linear, groups of 128 with zeros": {"quantization": "int4"},
}
WEIGHTS: dict[str, layouts.Layout] = {
    "int4 weights, groups of 128": partial(layouts.pack_quantized, group=128),
    "int4 weights, groups of 32": partial(layouts.pack_quantized, group=32),
    "int8 weights, groups of 128": partial(layouts.pack_quantized, bits=8, group=128),
    "NF4 weights": layouts.nf4,
    "MXFP4 weights": layouts.mxfp4,
    "NVFP4 weights": partial(layouts.nvfp4, kind="modelopt"),
}
GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_K_BLOCK = 256
"""Numbers of a block of a K type; layers of other widths cannot have it, and get what llama.cpp gives them instead."""
_INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_CALIBRATION = 8
"""Pages by which GPTQ is calibrated."""


GPTQ = "int4 weights, groups of 128, by GPTQ"
HEADS = {"int8 output head": "as it is", "int4 linear and int8 output head": "int4 linear, groups of 128 with zeros"}
"""Models whose head is rounded as int4 rounds one that is not the embedding, too -> the variant that the layers are of."""


def gguf_numbers(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight's numbers in a type of GGUF's, float32 [N, K]."""
    if name in _INSTEAD and weight.shape[1] % _K_BLOCK:
        name = _INSTEAD[name]
    kind, numbers = gguf.GGMLQuantizationType[name], weight.numpy()
    if name not in _INSTEAD:
        raw = gguf.quants.quantize(numbers, kind)
    else:
        from llama_cpp._ggml import libggml

        rounds = libggml.ggml_quantize_chunk
        rounds.restype, number = ctypes.c_size_t, ctypes.c_int64
        rounds.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, number, number, number, ctypes.c_void_p
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.empty((len(numbers), numbers.shape[1] // _K_BLOCK * block_bytes), np.uint8)
        rounds(kind.value, numbers.ctypes.data, raw.ctypes.data, 0, *numbers.shape, None)
    return torch.from_numpy(gguf.quants.dequantize(raw, kind))


def linears(layers: torch.nn.Module) -> list[Any]:
    """The linear layers inside a module."""
    return [each for each in layers.modules() if isinstance(each, Linear)]


@torch.inference_mode()
def replace(linear: Any, numbers: torch.Tensor) -> None:
    """Gives a layer in the model's dtype other weights."""
    linear.method.weight.copy_(numbers)
    linear.method.finish()


@torch.inference_mode()
def round_head(model: DecoderModel) -> None:
    """Rounds the head alone; where the embedding is the head, that stays as it is."""
    weight = model.head._method.weight
    shape = LinearShape((LinearPart("lm_head", whole(len(weight))),), whole(weight.shape[1]))
    head = Int8Head(shape, len(weight), weight.dtype, device_ops(weight.device))
    head.slots()["lm_head.weight"].target.copy_(weight)
    head.finish()
    model.head._method = head


@torch.inference_mode()
def calibrate(path: Path, device: str, pieces: list[list[int]], model: DecoderModel) -> None:
    """Gives a model the weights that GPTQ makes of its own, as `sapwood model quantize` does it."""
    ops, four_bits = device_ops(device), scheme("int4")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    loaded = load_model(path, "auto", dtype, ops, context_length=None, threads=2, seed=0, stored_weights="widen")
    run = LayerRun(loaded, pieces, dtype, ops.device)
    for index, layer in enumerate(loaded.model.layers):
        moments, _ = run.watch(index)
        for linear, target in zip(linears(layer), linears(model.layers[index]), strict=True):
            numbers = four_bits.round(linear.method.weight.float(), moments[linear], torch.bfloat16).numbers
            replace(linear, numbers)
            replace(target, numbers)
        run.advance(index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo-base", help="As the worker takes it (default: demo-base).")
    parser.add_argument("--device", default="cpu", help="Default: cpu.")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "docs", help="A file or a folder.")
    parser.add_argument("--tokens", type=int, default=1500, help="Of the text, in pieces of 500 (default: 1500).")
    parser.add_argument("--only", help="Schemes whose names hold one of these words, divided by commas (default: all).")
    arguments = parser.parse_args()
    files = [arguments.text] if arguments.text.is_file() else sorted(arguments.text.glob("*.md"))
    tokenizer = load_tokenizer(resolve_tokenizer(arguments.model))
    pieces: list[list[int]] = []
    for file in files:
        ids = tokenizer.tokenizer.encode(file.read_text(), add_special_tokens=True).ids[:500]
        if len(pieces) * 500 < arguments.tokens:
            pieces.append(ids)
    others = [tokenizer.tokenizer.encode(file.read_text()).ids[:500] for file in files[len(pieces) :][:_CALIBRATION]]
    plain: list[torch.Tensor] = []
    types = [name for name in GGUF if name not in _INSTEAD or find_spec("llama_cpp")]
    words = (arguments.only or "").split(",")
    for name in (*VARIANTS, *HEADS, *WEIGHTS, *types, GPTQ):
        if name != "as it is" and not any(word in name for word in words):
            continue
        runner = build_runner(
            RunnerOptions(
                model_path=resolve_model(arguments.model),
                device=arguments.device,
                num_pages=64,
                max_running=2,
                **({"stored_weights": "widen"} | VARIANTS.get(HEADS.get(name, name), {})),
            )
        )
        model = runner._model
        if name in WEIGHTS:
            for linear in linears(model.layers):
                replace(linear, WEIGHTS[name](linear.method.weight.float())[1])
        if name in HEADS:
            round_head(model)
        if name in GGUF:
            for linear in linears(model.layers):
                replace(linear, gguf_numbers(name, linear.method.weight.float()))
        if name == GPTQ:
            calibrate(resolve_model(arguments.model), arguments.device, others, model)
        found = []
        for ids in pieces:
            part = Part(0, ids, 0, True, SamplingParams())
            table = np.arange(64, dtype=np.int32).reshape(2, 32)
            found.append(runner.logits(step_for(runner.info, 0, table, [part])).cpu().log_softmax(-1))
        plain = plain or found
        loss = [
            -each[:-1].gather(1, torch.tensor(ids)[1:, None]).mean() for each, ids in zip(found, pieces, strict=True)
        ]
        divergence = [(a.exp() * (a - b)).sum(-1).mean() for a, b in zip(plain, found, strict=True)]
        same = [(a.argmax(-1) == b.argmax(-1)).float().mean() for a, b in zip(plain, found, strict=True)]
        row = {
            "what": f"{arguments.model} {name}",
            "perplexity": round(float(torch.stack(loss).mean().exp()), 3),
            "mean KL to the model as it is": round(float(torch.stack(divergence).mean()), 5),
            "same likeliest token": round(float(torch.stack(same).mean()), 4),
        }
        print(json.dumps(row | {"tokens": sum(map(len, pieces)), "device": arguments.device}), flush=True)


if __name__ == "__main__":
    main()
