"""Opens a store by its URL."""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import urlsplit

from sapwood_common.errors import ConfigError, UnavailableError
from sapwood_common.models.model_files import sapwood_home
from sapwood_router.store.records import Retention, Store
from sapwood_router.store.sql import SqlStore
from sapwood_router.store.sqlite import MEMORY, SqliteDriver

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 60.0
_REDIS = ("redis", "rediss")


FORMS = "memory, sqlite, sqlite:PATH, postgresql://USER:PASSWORD@HOST/DATABASE, redis://:PASSWORD@HOST:PORT/NUMBER"


def is_store(url: str) -> bool:
    """Whether there are stores of such a URL."""
    return url == "memory" or url.partition(":")[0] in ("sqlite", "postgresql", "postgres", *_REDIS)


def default_path(port: int) -> str:
    """The file of a router that is given none; the port tells routers of one machine apart. A free port is another each time:
    such a router keeps all in memory."""
    return str(sapwood_home() / "store" / f"router-{port}.sqlite") if port else MEMORY


def open_store(url: str, port: int, retention: Retention) -> Store:
    """Opens a store.

    Args:
        url: One of ``FORMS``.
        port: The router's HTTP port.
        retention: What goes when.

    Raises:
        ConfigError: It cannot be opened.
    """
    scheme, _, rest = url.partition(":")
    if url == "memory":
        return SqlStore(SqliteDriver(MEMORY), retention)
    if scheme == "sqlite":
        path = urlsplit(url).path if rest.startswith("//") else rest
        return SqlStore(SqliteDriver(path or default_path(port)), retention)
    if scheme in ("postgresql", "postgres"):
        try:
            from sapwood_router.store.postgres import PostgresDriver
        except ImportError:
            raise ConfigError("--store: Postgres needs asyncpg: pip install 'sapwood[postgres]'") from None
        return SqlStore(PostgresDriver(url), retention)
    if scheme in _REDIS:
        try:
            from sapwood_router.store.redis_store import RedisStore
        except ImportError:
            raise ConfigError("--store: Redis needs redis: pip install 'sapwood[redis]'") from None
        try:
            return RedisStore(url, retention)
        except ValueError as error:
            raise ConfigError(f"--store: {error}") from None
    raise ConfigError(f"--store: {scheme}: is none of {FORMS}")


async def follow_retention(store: Store) -> None:
    """Deletes what has expired, again and again."""
    while True:
        try:
            await store.sweep()
        except UnavailableError as error:
            logger.warning("what has expired is not deleted yet: %s", error.message)
        await asyncio.sleep(_SWEEP_SECONDS)
