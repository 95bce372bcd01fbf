"""Which backend is meant: its URL, the model there, what clients call it, and the key."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

_SCHEMES = ("http://", "https://")
_OPTIONS = ("url", "model", "name", "api-key-env")


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One model of one server.

    Attributes:
        url: Where OpenAI's API is; ``/v1`` where it has no path.
        model: The server's name for the model; "": the only model that it lists.
        name: The clients' name for the model; "": the server's name.
        authorization: Sent as the header of that name; "": none. The URL has no credentials: it names the backend in metrics,
            logs and pages.
    """

    url: str
    model: str = ""
    name: str = ""
    authorization: str = field(default="", repr=False)

    @property
    def address(self) -> str:
        """What names it in the fleet: ``URL`` or ``URL#MODEL``."""
        return f"{self.url}#{self.model}" if self.model else self.url

    @property
    def base(self) -> str:
        """What paths such as ``/chat/completions`` are appended to."""
        return self.url if urlsplit(self.url).path else f"{self.url}/v1"

    @property
    def root(self) -> str:
        """The server without a path."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"


def is_backend(address: str) -> bool:
    """Whether a member of the fleet is asked over HTTP."""
    return address.startswith(_SCHEMES)


def has_credentials(address: str) -> bool:
    """Whether an address is a URL with a user's name or password, or what may be one."""
    return is_backend(address) and "@" in urlsplit(address).netloc


def backend_at(address: str) -> BackendSpec:
    """The backend that ``URL`` or ``URL#MODEL`` means."""
    url, _, model = address.partition("#")
    url, authorization = _without_credentials(url.rstrip("/"))
    return BackendSpec(url, model, authorization=authorization)


def parse_backend(text: str, variables: Mapping[str, str]) -> BackendSpec:
    """``url=URL[,model=MODEL][,name=NAME][,api-key-env=VARIABLE]``.

    Args:
        text: That.
        variables: The environment, where the key is.

    Raises:
        ValueError: It is not.
    """
    given: dict[str, str] = {}
    for number, part in enumerate(text.split(","), 1):
        option, equals, value = part.partition("=")
        if option not in _OPTIONS or not equals or not value or option in given:
            shown = repr(option) if equals else f"part {number}"  # a part without a name may be one of a password
            raise ValueError(f"{shown} is none of {', '.join(f'{known}=...' for known in _OPTIONS)}")
        given[option] = value
    url = given.get("url", "").rstrip("/")
    if not is_backend(url) or not urlsplit(url).hostname or "#" in url or "?" in url:
        raise ValueError("a backend needs url=http://... or url=https://..., without a query")
    url, authorization = _without_credentials(url)
    variable = given.get("api-key-env", "")
    if variable and not variables.get(variable):
        raise ValueError(f"the variable {variable}, which is to hold the key of {url}, is not set")
    if variable:
        authorization = f"Bearer {variables[variable]}"
    return BackendSpec(url, given.get("model", ""), given.get("name", ""), authorization)


def _without_credentials(url: str) -> tuple[str, str]:
    """A URL without a user's name and password, and the header that says them; "": there are none."""
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    credentials, at, host = authority.rpartition("@")
    if not at:
        return url, ""
    pair = ":".join(unquote(part) for part in (*credentials.split(":", 1), "")[:2])
    return f"{scheme}://{host}{slash}{path}", f"Basic {b64encode(pair.encode()).decode()}"
