"""Which backend is meant: its URL, the model there, what clients call it, and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_SCHEMES = ("http://", "https://")
_OPTIONS = ("url", "model", "name", "api-key-env")


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One model of one server.

    Attributes:
        url: Where OpenAI's API is; ``/v1`` where it has no path.
        model: What the server calls the model; "": the only one that it lists.
        name: What clients call it; "": what the server calls it.
        key: Sent as bearer token; "": none.
    """

    url: str
    model: str = ""
    name: str = ""
    key: str = field(default="", repr=False)

    @property
    def address(self) -> str:
        """What names it in the fleet: ``URL`` or ``URL#MODEL``."""
        return f"{self.url}#{self.model}" if self.model else self.url

    @property
    def base(self) -> str:
        """What paths such as ``/chat/completions`` are appended to."""
        return self.url if urlsplit(self.url).path else f"{self.url}/v1"


def is_backend(address: str) -> bool:
    """Whether a member of the fleet is asked over HTTP."""
    return address.startswith(_SCHEMES)


def backend_at(address: str) -> BackendSpec:
    """The backend that ``URL`` or ``URL#MODEL`` means."""
    url, _, model = address.partition("#")
    return BackendSpec(url.rstrip("/"), model)


def parse_backend(text: str, variables: Mapping[str, str]) -> BackendSpec:
    """``url=URL[,model=MODEL][,name=NAME][,api-key-env=VARIABLE]``.

    Args:
        text: That.
        variables: The environment, where the key is.

    Raises:
        ValueError: It is not.
    """
    given: dict[str, str] = {}
    for part in text.split(","):
        option, equals, value = part.partition("=")
        if option not in _OPTIONS or not equals or not value or option in given:
            raise ValueError(f"{part!r} of {text!r} is none of {', '.join(f'{known}=...' for known in _OPTIONS)}")
        given[option] = value
    url = given.get("url", "").rstrip("/")
    if not is_backend(url) or not urlsplit(url).hostname or "#" in url:
        raise ValueError(f"{text!r} needs url=http://... or url=https://...")
    variable = given.get("api-key-env", "")
    if variable and not variables.get(variable):
        raise ValueError(f"the variable {variable}, which is to hold the key of {url}, is not set")
    return BackendSpec(url, given.get("model", ""), given.get("name", ""), variables[variable] if variable else "")
