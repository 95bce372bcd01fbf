"""`sapwood model quantize`: a checkpoint in fewer bits."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sapwood.cli.derived.verb import Fetch, add_verb, need_packages, writing
from sapwood.cli.errors import REFUSED, CliError
from sapwood.cli.terminal import open_terminal
from sapwood_common.settings.flags import whole_number

if TYPE_CHECKING:  # at run time only what needs it imports it
    from sapwood_common.models.progress import Progress
    from sapwood_worker.model.quantizer.quantize import Quantized

_DESCRIPTION = """\
Writes a copy of a model whose linear layers are stored in few bits.

int4, int8 and float8 write a folder in the format of the compressed-tensors library: sapwood, vLLM and transformers (with that
library) read it. int4: weights in groups that share a scale, by GPTQ with the text's help, else rounded to the nearest. int8 and
float8: weights and activations, a scale for each output and token. Embedding and output head stay as they are.

The others write a GGUF file, OUT.gguf, with the tokenizer in it: sapwood, llama.cpp and what is built on it read it. f32, f16 and
bf16 round to that type, q4_0 to q8_0 to blocks of 32 numbers. Llama, Mistral, Qwen2, Qwen3 and Gemma 3 can be written.

Of the text four fifths calibrate int4; of the rest perplexity is told, before and after.
"""
_FOLDER = ("int4", "int8", "float8")
_GGUF = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "bf16", "f16", "f32")
_PIECE = 512
_LEAST = 16
"""Tokens of a piece of text, and of the shortest that counts."""
_GROUP = 128


def configure(nouns: Any, fetch: Fetch) -> None:
    """Adds the verb to those of `sapwood model`."""
    help_line = "write a copy of a model in fewer bits"
    parser = add_verb(nouns, "quantize", run, fetch, help_line=help_line, description=_DESCRIPTION)
    parser.add_argument(
        "--scheme",
        type=str.lower,
        choices=(*_FOLDER, *_GGUF),
        help="how numbers are stored [default: q8_0 if OUT ends with .gguf, else int4]",
    )
    parser.add_argument(
        "--group-size",
        type=whole_number(),
        choices=(32, 64, 128),
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
    is_file = arguments.out.suffix == ".gguf"
    scheme = arguments.scheme or ("q8_0" if is_file else "int4")
    if is_file and scheme in _FOLDER:
        raise CliError(
            f"OUT: {scheme} writes a folder; a .gguf file is written with --scheme {', '.join(_GGUF)}", REFUSED
        )
    if not is_file and scheme in _GGUF:
        raise CliError(f"OUT: {scheme} writes a GGUF file: {arguments.out}.gguf", REFUSED)
    if arguments.group_size is not None and scheme != "int4":
        raise CliError(f"--group-size: {scheme} has no groups of a size to choose; int4 has", REFUSED)
    need_packages("worker,tokenizer")
    import torch

    from sapwood_worker.model.quantizer.quantize import check_paths

    source = fetch(arguments.model, arguments.revision)
    with writing():
        check_paths(source, arguments.out)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if arguments.device == "auto" else arguments.device
    pieces = _pieces(arguments, source)
    terminal = open_terminal(sys.stderr)
    try:
        with writing():
            done = _write(scheme, arguments, source, pieces, device, terminal.progress)
    finally:
        terminal.close()
    if done.wide:
        block = (arguments.group_size or _GROUP) if scheme == "int4" else 32
        print(f"{len(done.wide)} projections stay as they are: their inputs are no multiple of {block}")
    before, after = _bytes(source), _bytes(arguments.out)
    print(f"{arguments.out}: {after / 1e6:.1f} MB of weights, before {before / 1e6:.1f} MB")
    if done.before is not None and done.after is not None:
        count = sum(map(len, pieces[_calibrating(pieces) :]))
        print(f"perplexity of {count} tokens that did not calibrate: {done.before:.3f} before, {done.after:.3f} after")
    return 0


def _calibrating(pieces: Sequence[Sequence[int]]) -> int:
    """How many of the pieces calibrate; of the others perplexity is measured."""
    return -(-4 * len(pieces) // 5)


def _write(
    scheme: Any,
    arguments: argparse.Namespace,
    source: Path,
    pieces: Sequence[Sequence[int]],
    device: str,
    progress: Progress,
) -> Quantized:
    import torch

    from sapwood_worker.model.quantizer.quantize import Quantized, perplexity_of, quantize
    from sapwood_worker.model.quantizer.schemes import scheme as scheme_of

    cut, threads = _calibrating(pieces), torch.get_num_threads()
    if scheme in _FOLDER:
        return quantize(
            source,
            arguments.out,
            scheme_of(scheme, arguments.group_size or _GROUP),
            calibration=pieces[:cut],
            measured=pieces[cut:],
            device=device,
            threads=threads,
            progress=progress,
        )
    from sapwood_common.models.model_files import model_name
    from sapwood_tokenizer.vocab.loader import load_tokenizer, resolve_tokenizer
    from sapwood_tokenizer.vocab.special_tokens import VocabularyError
    from sapwood_tokenizer.vocab.write_gguf_vocab import gguf_vocabulary
    from sapwood_worker.model.loader import read_config
    from sapwood_worker.model.quantizer.write_gguf import write_gguf

    rows = read_config(source)[1].vocab_size
    tokenizer = load_tokenizer(resolve_tokenizer(str(source)))
    try:
        vocabulary = gguf_vocabulary(tokenizer, rows)
    except VocabularyError as error:
        raise CliError(f"{tokenizer.origin}: {error}", REFUSED) from None
    wide = write_gguf(source, arguments.out, scheme, model_name(arguments.model), vocabulary.metadata, progress)
    if vocabulary.difference:
        print(f"note: the file holds tokenizer.json, too: programs that do not read it cut {vocabulary.difference}")
    before, after = (perplexity_of(path, pieces[cut:], device, threads) for path in (source, arguments.out))
    return Quantized(before, after, wide)


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


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.glob("*.safetensors"))
