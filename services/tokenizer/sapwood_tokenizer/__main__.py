"""``python -m sapwood_tokenizer``: starts the tokenizer service."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # ``python -m`` puts the current folder there: its numpy.py would be imported


from sapwood_common.settings.config import parse_config
from sapwood_common.telemetry.logs import setup_logging
from sapwood_tokenizer.app import run
from sapwood_tokenizer.config import TokenizerConfig


def main() -> int:
    """Entry point."""
    config = parse_config(TokenizerConfig, "sapwood_tokenizer", "Turns text into token ids and token ids into text.")
    setup_logging("tokenizer", config.log_level, config.log_format)
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
