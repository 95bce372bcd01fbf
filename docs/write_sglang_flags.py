"""Writes sglang-flags.md from ``sapwood/cli/sglang_flags.toml``: ``python docs/write_sglang_flags.py [--check]``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sapwood.cli.flags_of_others import of_sglang

_PAGE = Path(__file__).parent / "sglang-flags.md"
_TABLE = Path(__file__).parents[1] / "sapwood" / "cli" / "sglang_flags.toml"
_HEAD = """# Flags of SGLang's server

<!-- Written by docs/write_sglang_flags.py (make docs): change sapwood/cli/sglang_flags.toml. -->

Every flag of `python -m sglang.launch_server` (0.5.23), and what stands for it in `sapwood up`. Where a service runs by itself
its flags have no prefix: `--worker-max-running` is `--max-running` of the worker. [configuration.md](configuration.md) has all
of ours. `sapwood up` answers a flag of SGLang's with what this page says, and the flags of `vllm serve` that people use most.
"""


def page() -> str:
    """The page's text."""
    # The file's comments are the page's sections: a section has the tables that follow its comment.
    parts = re.split(r"^# --- (.*?) -+$", _TABLE.read_text("utf-8"), flags=re.MULTILINE)
    rows, lines = iter(of_sglang()), [_HEAD]
    for title, part in zip(parts[1::2], parts[2::2], strict=True):
        lines += [f"## {title}\n", "| SGLang | here | |", "|---|---|---|"]
        for _ in range(part.count("[[of]]")):
            row = next(rows)
            named = " ".join(f"`--{flag}`" for flag in row.flags)
            lines.append(f"| {named} | {' '.join(f'`{flag}`' for flag in row.ours)} | {row.why} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Writes the page, or compares it."""
    if "--check" in sys.argv[1:]:
        return int(not _PAGE.is_file() or _PAGE.read_text() != page())
    _PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
