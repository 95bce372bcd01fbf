"""SGLang's language, without its server: ``import sglang_lang`` in front of ``import sglang``.

Lays the folder that holds a release's ``sglang/lang`` on the path, and stands in for what the language imports of the server.
``sglang_lang.py FOLDER URL TEST...`` runs published test programs against a server, and prints how each ended as JSON.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import sys
import traceback
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from urllib.request import Request, urlopen


def lay(folder: Path) -> Any:
    """Makes ``sglang`` of the release's language alone: what its own ``__init__`` takes from there."""
    package = types.ModuleType("sglang")
    package.__path__ = [str(folder / "sglang")]
    sys.modules["sglang"] = package
    for absent in (
        *("sglang.srt", "sglang.srt.environ", "sglang.srt.utils", "sglang.srt.utils.network"),
        *("sglang.srt.utils.hf_transformers_utils", "IPython", "IPython.display"),
    ):
        sys.modules[absent] = MagicMock(name=absent)
    sys.modules["sglang.srt.utils"].is_hip = lambda: False  # type: ignore[attr-defined]
    tree = ast.parse((folder / "sglang/__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sglang.lang"):
            exec(compile(ast.Module([node], []), "sglang/__init__.py", "exec"), vars(package))
    return package


class Tokenizer:
    """In the place of the model's: the server's own."""

    def __init__(self, url: str) -> None:
        self._url = url

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
        request = Request(f"{self._url}/tokenize", body, {"content-type": "application/json"})
        with urlopen(request) as answer:
            return list(json.load(answer)["tokens"])


def main() -> None:
    """Runs the tests that are named."""
    folder, url, *names = sys.argv[1:]
    sgl = lay(Path(folder))
    sys.modules["sglang.srt.utils.hf_transformers_utils"].get_tokenizer = lambda _: Tokenizer(url)  # type: ignore[attr-defined]

    class Counting(sgl.RuntimeEndpoint):  # type: ignore[misc]
        """Counts prompt tokens, which a program of speculation reads, as SGLang's backend of OpenAI's API does."""

        def __init__(self, url: str) -> None:
            super().__init__(url)
            self.endpoint = self  # of a Runtime, which another program expects
            self.token_usage = self
            self.prompt_tokens = 0

        def reset(self) -> None:
            """Begins to count."""
            self.prompt_tokens = 0

        def generate(self, s: Any, sampling_params: Any) -> Any:
            """The answer, counted."""
            found, meta = super().generate(s, sampling_params)
            self.prompt_tokens += meta["prompt_tokens"]
            return found, meta

    backend = Counting(url)
    sgl.set_default_backend(backend)
    # Keys and values of texts that stand elsewhere cannot be joined exactly: joins are of texts. The server refuses the other.
    sgl.global_config.enable_parallel_encoding = False
    spec = importlib.util.spec_from_file_location("programs", Path(folder) / "sglang/test/test_programs.py")
    assert spec is not None and spec.loader is not None
    programs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(programs)
    ended: dict[str, str] = {}
    for name in names:
        test = getattr(programs, name)
        asked = {"check_answer": False} if "check_answer" in inspect.signature(test).parameters else {}
        try:
            test(**asked)
            ended[name] = "ok"
        except AssertionError as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            ended[name] = f"AssertionError in {Path(last.filename).name}: {last.line}: {error}"
        except Exception as error:
            ended[name] = f"{type(error).__name__}: {error}"
        print(json.dumps({name: ended[name]}), file=sys.stderr, flush=True)
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
