"""Writes docs/configuration.md from the same parsers that answer `--help`.

make docs          writes it
python docs/write_configuration.py --check    exits 1 if it is not up to date
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from sapwood.cli.main import build_parser as sapwood_parser
from sapwood_common.settings.config import ServiceConfig, build_parser
from sapwood_router.config import RouterConfig
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_worker.config import WorkerConfig

TARGET = Path(__file__).resolve().parent / "configuration.md"

HEAD = """\
# Configuration

Written by `make docs` from the parsers that answer `--help`; a test checks that it is fresh.

A setting of a service is, first match wins: its flag, its environment variable, its entry in the YAML file that `--config`
names (the flag's name with underscores: `drain_timeout: 10`), the default. One that would change nothing beside the others, such
as `--storage` without a second tier, is refused at the start, by its name.

`sapwood up` takes every flag of every service with the service's name before it, and `sapwood up --help` shows them by service.
What no flag says, and none of the variables SAPWOOD_UP_..., is the service's own variable, file or default. These two are one:

```bash
sapwood up --worker-max-running 8 --router-policy least_load --tokenizer-tool-parser hermes
SAPWOOD_WORKER_MAX_RUNNING=8 SAPWOOD_ROUTER_POLICY=least_load SAPWOOD_TOKENIZER_TOOL_PARSER=hermes sapwood up
```

Ports of workers are the first one's; each further worker takes the next. `--router-workers` and `--router-tokenizer` name others
beside those that `sapwood up` starts. With TLS at the router it is ready when its health says so on `--router-health-port`, a
free one unless given.

`SAPWOOD_HOME` (default `~/.cache/sapwood`) is where models and the history of `sapwood chat` are kept.
"""

_HELP = re.compile(r"(?P<text>.*?) \[(?:(?P<variable>[A-Z_]+); )?default: (?P<default>.*)\]", re.DOTALL)


def main() -> None:
    """Writes the page, or checks it."""
    text = render()
    if "--check" in sys.argv[1:]:
        if not TARGET.is_file() or TARGET.read_text() != text:
            sys.exit("docs/configuration.md is not up to date: make docs")
        return
    TARGET.write_text(text)


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    services: list[tuple[str, type[ServiceConfig]]] = [
        ("router", RouterConfig),
        ("tokenizer", TokenizerConfig),
        ("worker", WorkerConfig),
    ]
    for name, config in services:
        parts += [f"## `python -m sapwood_{name}`\n", table(build_parser(config, name, ""))]
    (verbs,) = [action for action in sapwood_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    for verb in ("up", "generate", "chat"):
        parts += [f"## `sapwood {verb}`\n", table(verbs.choices[verb])]
    return "\n".join(parts)


def table(parser: argparse.ArgumentParser) -> str:
    """The flags of a parser as a Markdown table."""
    rows = ["| flag | variable | default | |", "|---|---|---|---|"]
    for action in parser._actions:
        found = _HELP.fullmatch((action.help or "").replace("%%", "%"))
        if found is None or not action.option_strings:
            continue
        flags = " ".join(f"`{flag}`" for flag in action.option_strings)
        variable = f"`{found['variable']}`" if found["variable"] else ""
        cells = (flags, variable, found["default"], found["text"])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
