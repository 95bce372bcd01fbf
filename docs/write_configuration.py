"""Writes docs/configuration.md from the same parsers that answer `--help`.

make docs          writes it
python docs/write_configuration.py --check    exits 1 if it is not up to date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection
from pathlib import Path

from sapwood.cli.main import build_parser as sapwood_parser
from sapwood_common.settings.config import ServiceConfig, build_parser, flag_of
from sapwood_router.config import RouterConfig
from sapwood_tokenizer.config import TokenizerConfig
from sapwood_worker.config import WorkerConfig

TARGET = Path(__file__).resolve().parent / "configuration.md"

HEAD = """\
# Configuration

Written by `make docs` from the parsers that answer `--help`; a test checks that it is fresh.

A setting of a service is, first match wins: its flag, its environment variable, its entry in the YAML file that `--config`
names (the flag's name with underscores: `drain_timeout: 10`), the default. One that would have no effect with the others, such
as `--storage` without a second tier, is refused at the start, by its name.

Some settings have several parts. The first is given alone, others by name: `--queue-size 512,wait=10`; a YAML file may hold a
mapping, `queue_size: {size: 512, wait: 10}`. Parts that are left out have the defaults shown. `--no-prefix-cache` is
`--prefix-cache off`.

`sapwood up` takes every flag of every service with the service's name before it, and `sapwood up --help` shows them by service.
A setting without such a flag or a variable SAPWOOD_UP_... comes from the service's own variable, file or default. These two
commands do the same:

```bash
sapwood up --worker-max-running 8 --router-policy least_load --tokenizer-tool-parser hermes
SAPWOOD_WORKER_MAX_RUNNING=8 SAPWOOD_ROUTER_POLICY=least_load SAPWOOD_TOKENIZER_TOOL_PARSER=hermes sapwood up
```

Ports of workers are the first worker's; each further worker takes the next. `--router-workers` and `--router-tokenizer` add to
those that `sapwood up` starts. A router with TLS is ready when its health check says so on `--router-health-port`, a free port
unless given.

`SAPWOOD_HOME` (default `~/.cache/sapwood`) is where models and the history of `sapwood chat` are kept.
"""

_OLD = """\
## Old names

Settings of 0.1 under another name. Flag, variable and YAML entry still work in 0.2; a warning names the new one.

| service | 0.1 | 0.2 |
|---|---|---|
"""

_HELP = re.compile(r"(?P<text>.*?) \[(?:(?P<variable>[A-Z0-9_]+); )?default: (?P<default>.*)\]", re.DOTALL)


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
    shared = {flag_of(name) for name in ServiceConfig.model_fields}
    parts += ["## Every service\n", table(build_parser(RouterConfig, "router", ""), only=shared, service="…")]
    for name, config in services:
        parts += [f"## `python -m sapwood_{name}`\n", table(build_parser(config, name, ""), without=shared)]
    (verbs,) = [action for action in sapwood_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    parts += ["## `sapwood up`\n", table(verbs.choices["up"])]
    parts += ["## `sapwood generate` and `sapwood chat`\n", table(verbs.choices["generate"]), "Also for `chat`:\n"]
    asked = {flag for action in verbs.choices["generate"]._actions for flag in action.option_strings}
    parts.append(table(verbs.choices["chat"], without=asked))
    parts.append(_OLD + "".join(old_names(name, config) for name, config in services))
    return "\n".join(parts)


def old_names(service: str, config: type[ServiceConfig]) -> str:
    """The rows of a service's settings that got another name."""
    return "".join(
        f"| {service} | `{flag_of(old)}` | `{flag_of(new.setting)}{f' {new.part}=' if new.part else ''}` |\n"
        for old, new in config.retired.items()
    )


def table(
    parser: argparse.ArgumentParser, *, only: Collection[str] = (), without: Collection[str] = (), service: str = ""
) -> str:
    """The flags of a parser as a Markdown table.

    Args:
        parser: The parser.
        only: The flags to show; empty: all.
        without: Flags to leave out.
        service: What stands for the service's name in variables.
    """
    rows = ["| flag | variable | default | |", "|---|---|---|---|"]
    for action in parser._actions:
        found = _HELP.fullmatch((action.help or "").replace("%%", "%"))
        if found is None or not action.option_strings or set(action.option_strings) & set(without):
            continue
        if only and not set(action.option_strings) & set(only):
            continue
        flags = " ".join(f"`{flag}`" for flag in action.option_strings)
        variable = f"`{found['variable']}`" if found["variable"] else ""
        variable = variable.replace("_ROUTER_", f"_{service}_") if service else variable
        cells = (flags, variable, found["default"], found["text"])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
