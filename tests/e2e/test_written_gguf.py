"""A GGUF file that `sapwood model quantize` wrote is served from the file alone, with the answers of its checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sapwood_testing.models.tiny_models import make_tiny
from sapwood_testing.vocabularies import CORPUS, trained

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def sapwood(*words: str) -> str:
    command = [sys.executable, "-m", "sapwood.cli.main", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_written_file_answers_by_itself_as_its_checkpoint_does(tmp_path: Path) -> None:
    source = make_tiny("wide", tmp_path / "model", vocab_size=400).path
    trained(CORPUS * 5, 400, "<|im_start|>", "<|im_end|>").save(str(source / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "eos_token_id": 1}))
    alone = tmp_path / "elsewhere" / "model.gguf"
    alone.parent.mkdir()
    sapwood("model", "quantize", str(source), str(alone), "--scheme", "f32")
    asked = [sapwood("run", str(model), "Hello, world", "--max-tokens", "24") for model in (source, alone)]
    assert asked[0] == asked[1]
    assert len(asked[0]) > 10
