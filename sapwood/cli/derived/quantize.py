"""`sapwood model quantize`: a checkpoint in fewer bits."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sapwood.cli.derived.verb import Fetch, add_verb, need_packages, writing
from sapwood.cli.errors import REFUSED, CliError
from sapwood.cli.terminal import open_terminal
from sapwood_common.settings.flags import whole_number

_DESCRIPTION = """\
Writes a copy of a model whose linear layers are stored in few bits, in the format of the compressed-tensors library: sapwood,
vLLM and transformers (with that library) read it. int4: weights in groups that share a scale, by GPTQ with the text's help, else
rounded to the nearest. int8 and float8: weights and activations, a scale for each output and token. Embedding and output head
stay as they are. Of the text four fifths calibrate; of the rest perplexity is told, before and after.
"""
_PIECE = 512
_LEAST = 16
"""Tokens of a piece of text, and of the shortest that counts."""


def configure(nouns: Any, fetch: Fetch) -> None:
    """Adds the verb to those of `sapwood model`."""
    help_line = "write a copy of a model in fewer bits"
    parser = add_verb(nouns, "quantize", run, fetch, help_line=help_line, description=_DESCRIPTION)
    parser.add_argument("--scheme", choices=("int4", "int8", "float8"), default="int4", help="[default: int4]")
    parser.add_argument(
        "--group-size",
        type=whole_number(),
        choices=(32, 64, 128),
        default=128,
        help="inputs that share a scale of int4 [default: 128]",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text to calibrate and measure with, UTF-8 [default: none]"
    )
    parser.add_argument(
        "--tokens",
        type=whole_number(1),
        default=65_536,
        metavar="N",
        help="most tokens of it that are used [default: 65536]",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda if it is there [default: auto]")


def run(fetch: Fetch, arguments: argparse.Namespace) -> int:
    """Quantises; returns the exit code, raises CliError."""
    need_packages("worker,tokenizer")
    import torch

    from sapwood_worker.model.quantizer.quantize import quantize
    from sapwood_worker.model.quantizer.schemes import scheme

    source = fetch(arguments.model, arguments.revision)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if arguments.device == "auto" else arguments.device
    pieces = _pieces(arguments, source)
    cut = -(-4 * len(pieces) // 5)
    terminal = open_terminal(sys.stderr)
    try:
        with writing():
            done = quantize(
                source,
                arguments.out,
                scheme(arguments.scheme, arguments.group_size),
                calibration=pieces[:cut],
                measured=pieces[cut:],
                device=device,
                threads=torch.get_num_threads(),
                progress=terminal.progress,
            )
    finally:
        terminal.close()
    if done.wide:
        print(f"{len(done.wide)} projections stay as they are: their inputs are no multiple of {arguments.group_size}")
    before, after = _bytes(source), _bytes(arguments.out)
    print(f"{arguments.out}: {after / 1e6:.1f} MB of weights, before {before / 1e6:.1f} MB")
    if done.before is not None and done.after is not None:
        count = sum(map(len, pieces[cut:]))
        print(f"perplexity of {count} tokens that did not calibrate: {done.before:.3f} before, {done.after:.3f} after")
    return 0


def _pieces(arguments: argparse.Namespace, source: Path) -> list[list[int]]:
    """The text in pieces of token ids; none without a text."""
    if arguments.text is None:
        return []
    from sapwood_common.errors import ConfigError
    from sapwood_tokenizer.vocab.loader import load_tokenizer, resolve_tokenizer

    try:
        text = arguments.text.read_text(encoding="utf-8")
        tokenizer = load_tokenizer(resolve_tokenizer(str(source))).tokenizer
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"--text {arguments.text}: {error}", REFUSED) from None
    except ConfigError as error:
        raise CliError(str(error), REFUSED) from None
    ids = tokenizer.encode(text, add_special_tokens=False).ids[: arguments.tokens]
    start = tokenizer.encode("", add_special_tokens=True).ids[:1]
    size = min(_PIECE, max(len(ids) // 5, _LEAST))
    pieces = [start + ids[first : first + size] for first in range(0, len(ids), size)]
    pieces = [piece for piece in pieces if len(piece) >= _LEAST]
    if len(pieces) < 2:
        raise CliError(f"--text {arguments.text}: {len(ids)} tokens are too few", REFUSED)
    return pieces


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
