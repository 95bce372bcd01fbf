"""Settings of a file that note which of them are read, so that what nobody reads can be refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sapwood_worker.model.families.known_keys import says_nothing


@dataclass(slots=True)
class Reads:
    """What was read of a file.

    Attributes:
        names: The settings; the name of one inside an object follows the object's name and a dot.
        last: The latest.
    """

    names: set[str] = field(default_factory=set)
    last: str = ""


class Settings(Mapping[str, Any]):
    """Settings as a JSON object has them. To look one up is to read it; to list them is not.

    Args:
        values: The settings.
        reads: Where names of settings that are read go.
        prefix: What comes before the names.
    """

    def __init__(self, values: Mapping[str, Any], reads: Reads | None = None, prefix: str = "") -> None:
        self._values, self._prefix = values, prefix
        self.reads = Reads() if reads is None else reads

    def __getitem__(self, key: str) -> Any:
        name = self._prefix + key
        self.reads.names.add(name)
        self.reads.last = name
        value = self._values[key]
        return Settings(value, self.reads, f"{name}.") if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)

    def but(self, changes: Mapping[str, Any]) -> Settings:
        """These settings with changes."""
        return Settings({**self._values, **changes}, self.reads, self._prefix)

    def over(self, defaults: Mapping[str, Any]) -> Settings:
        """These settings, but for those that are null, over defaults."""
        given = {key: value for key, value in self._values.items() if value is not None}
        return Settings({**defaults, **given}, self.reads, self._prefix)

    def same(self, first: str, second: str) -> bool:
        """Whether two settings are there and say the same. Reads neither."""
        return first in self._values and self._values[first] == self._values.get(second)

    def idle(self, *names: str) -> None:
        """Notes as read what says nothing here, since another setting turns it off."""
        self.reads.names.update(self._prefix + name for name in names)

    def flat(self) -> dict[str, Any]:
        """All settings by their names. Reads none."""
        found: dict[str, Any] = {}
        for key, value in self._values.items():
            found[self._prefix + key] = value
            if isinstance(value, dict):
                found |= Settings(value, self.reads, f"{self._prefix}{key}.").flat()
        return found

    def unread(self) -> dict[str, Any]:
        """The settings that nobody has read and that say something, by their names."""
        found: dict[str, Any] = {}
        for key, value in self._values.items():
            name = self._prefix + key
            if says_nothing(value):
                continue
            if name not in self.reads.names:
                found[name] = value
            elif isinstance(value, dict):
                found |= Settings(value, self.reads, f"{name}.").unread()
        return found
