"""The URL that names a store: ``scheme://host/path?setting=value&...``."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from sapwood_common.errors import ConfigError

_GIB = 1 << 30


class StorageUrl:
    """A URL. A kind of store takes its settings from it one by one, and then calls :meth:`finish`.

    Raises:
        ConfigError: It is no URL.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            parts = urlsplit(text)
            self._settings = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        except ValueError as error:
            raise ConfigError(f"--storage: {text!r} is not a URL: {error}") from error
        self.scheme = parts.scheme
        self.host = parts.netloc
        self.path = unquote(parts.path)

    def take(self, name: str, default: str = "") -> str:
        """Removes and returns a setting."""
        return self._settings.pop(name, default)

    def take_bytes(self, name: str, default: str) -> int:
        """A setting in GiB, as bytes.

        Raises:
            ConfigError: It is not a number.
        """
        text = self.take(name, default)
        try:
            return int(float(text) * _GIB)
        except (ValueError, OverflowError):
            raise ConfigError(f"--storage: {text!r} in {self.text!r} is not a number") from None

    def take_folder(self, shown: str) -> tuple[Path, int]:
        """The absolute folder that the path names, and the most bytes it is to hold (``size_gb``).

        Args:
            shown: An example of such a URL, for errors.

        Raises:
            ConfigError: The path is not absolute, or the size is not above 0.
        """
        folder, size = Path(self.path), self.take_bytes("size_gb", "10")
        self.expect(size > 0, "size_gb must be more than 0")
        self.expect(folder.is_absolute() and folder != Path("/"), f"name an absolute folder: {shown}")
        return folder, size

    def expect(self, condition: bool, problem: str) -> None:
        """Refuses the URL unless the condition holds.

        Raises:
            ConfigError: It does not hold.
        """
        if not condition:
            raise ConfigError(f"--storage: {self.text!r}: {problem}")

    def finish(self) -> None:
        """Refuses settings that nobody has taken.

        Raises:
            ConfigError: There is one.
        """
        self.expect(not self._settings, f"unknown setting {next(iter(self._settings), '')!r}")
