"""A store in Redis or Valkey, for routers of several machines.

Each operation is one Lua script, which the server runs as a whole, so that none is half done. Redis writes to disk as it is
configured to: with ``appendonly no`` what was answered last is lost with the server. One server, or one with replicas: a tenant's
records lie under several keys, which a cluster would spread.

Keys, all with ``sapwood:`` before them (``|`` is a NUL byte):

- ``r:KIND|TENANT|KEY``: a hash, the record;
- ``b:KIND|TENANT|PARENT``: the keys of the records below a parent, by position;
- ``k:KIND``: ``TENANT|KEY`` of all records of a kind;
- ``t:TENANT``: ``KIND|KEY`` of all records of a tenant;
- ``n:GROUP``, ``s:GROUP``, ``z:GROUP``: how many records and bytes each tenant has, and the bytes of all;
- ``u:TENANT``, ``u``: when kept records were used last; ``x``: when records expire.

Invariant: all of these are changed by ``write`` and ``drop`` alone. To write or delete a record takes O(log records), and as much
for each that goes with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from redis import asyncio as redis
from redis.exceptions import RedisError

from sapwood_common.errors import UnavailableError
from sapwood_router.store.records import (
    CHILDREN,
    COUNTED,
    GROUPS,
    KEPT,
    MOST_AT_ONCE,
    OVERHEAD,
    PARENTS,
    Record,
    Retention,
    can_be_key,
)

_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 30.0
_MOST_CONNECTIONS = 16
_SWEPT_AT_ONCE = 1000
_KEPT_KINDS = frozenset(("response", "conversation"))
"""Those that give way by themselves; items go with their conversation."""


def _table(name: str, values: dict[str, str]) -> str:
    inner = ", ".join(f"{key} = '{value}'" for key, value in values.items())
    return f"local {name} = {{{inner}}}"


_SCRIPT = "\n".join(
    (
        _table("GROUPS", GROUPS),
        _table("CHILDREN", CHILDREN),
        _table("PARENTS", PARENTS),
        _table("COUNTED", dict.fromkeys(sorted(COUNTED), "1")),
        _table("GIVES_WAY", dict.fromkeys(sorted(_KEPT_KINDS), "1")),
        f"local OVERHEAD, KEPT, MOST_AT_ONCE = {OVERHEAD}, '{KEPT}', {MOST_AT_ONCE}",
        r"""
local P = 'sapwood:'
local call = redis.call

local function key_of(kind, tenant, key) return P .. 'r:' .. kind .. '\0' .. tenant .. '\0' .. key end
local function below_of(kind, tenant, parent) return P .. 'b:' .. kind .. '\0' .. tenant .. '\0' .. parent end

local function count(tenant, kind, records, size)
  local group = GROUPS[kind]
  if COUNTED[kind] and records ~= 0 then
    if call('HINCRBY', P .. 'n:' .. group, tenant, records) == 0 then call('HDEL', P .. 'n:' .. group, tenant) end
  end
  if size ~= 0 then
    if tonumber(call('ZINCRBY', P .. 's:' .. group, size, tenant)) == 0 then call('ZREM', P .. 's:' .. group, tenant) end
    call('INCRBY', P .. 'z:' .. group, size)
  end
end

local function use(kind, tenant, key, now)
  if GIVES_WAY[kind] then
    call('ZADD', P .. 'u:' .. tenant, now, kind .. '\0' .. key)
    call('ZADD', P .. 'u', now, kind .. '\0' .. tenant .. '\0' .. key)
  end
end

-- Whether the record that one of this kind is below is there; true where it is below none.
local function has_place(kind, tenant, parent)
  return not PARENTS[kind] or call('EXISTS', key_of(PARENTS[kind], tenant, parent)) == 1
end

local function write(kind, tenant, key, body, parent, position, expires, now)
  local record = key_of(kind, tenant, key)
  local earlier = call('HMGET', record, 'size', 'parent')
  if earlier[1] then
    call('ZREM', below_of(kind, tenant, earlier[2]), key)
    call('HINCRBY', record, 'version', 1)
    count(tenant, kind, 0, #body - earlier[1])
  else
    call('HSET', record, 'version', 0)
    call('ZADD', P .. 'k:' .. kind, 0, tenant .. '\0' .. key)
    call('SADD', P .. 't:' .. tenant, kind .. '\0' .. key)
    count(tenant, kind, 1, #body + OVERHEAD)
  end
  call('HSET', record, 'body', body, 'size', #body, 'parent', parent, 'position', position, 'expires', expires)
  call('ZADD', below_of(kind, tenant, parent), position, key)
  local place = kind .. '\0' .. tenant .. '\0' .. key
  if tonumber(expires) > 0 then call('ZADD', P .. 'x', expires, place) else call('ZREM', P .. 'x', place) end
  use(kind, tenant, key, now)
end

local function drop(kind, tenant, key)
  local record = key_of(kind, tenant, key)
  local earlier = call('HMGET', record, 'size', 'parent')
  if not earlier[1] then return 0 end
  local place = kind .. '\0' .. tenant .. '\0' .. key
  call('DEL', record)
  call('ZREM', below_of(kind, tenant, earlier[2]), key)
  call('ZREM', P .. 'k:' .. kind, tenant .. '\0' .. key)
  call('SREM', P .. 't:' .. tenant, kind .. '\0' .. key)
  call('ZREM', P .. 'x', place)
  call('ZREM', P .. 'u', place)
  call('ZREM', P .. 'u:' .. tenant, kind .. '\0' .. key)
  count(tenant, kind, -1, -(earlier[1] + OVERHEAD))
  local child = CHILDREN[kind]
  if child then
    for _, each in ipairs(call('ZRANGE', below_of(child, tenant, key), 0, -1)) do drop(child, tenant, each) end
  end
  return 1
end

local function drop_oldest(tenant)
  local oldest = call('ZRANGE', P .. 'u:' .. tenant, 0, 0)[1]
  if not oldest then return false end
  local kind, key = string.match(oldest, '^(%Z*)%z(.*)$')
  return drop(kind, tenant, key) == 1
end

local function make_room(tenant, most, most_bytes)
  while tonumber(call('HGET', P .. 'n:' .. KEPT, tenant) or 0) > tonumber(most) do
    if not drop_oldest(tenant) then break end
  end
  while tonumber(call('GET', P .. 'z:' .. KEPT) or 0) > tonumber(most_bytes) do
    local largest = call('ZREVRANGE', P .. 's:' .. KEPT, 0, 0)[1]
    if not largest or not drop_oldest(largest) then break end
  end
end

local function read(kind, tenant, key)
  local found = call('HMGET', key_of(kind, tenant, key), 'body', 'parent', 'position', 'expires', 'version')
  if not found[1] then return false end
  return {kind, tenant, key, found[1], found[2], found[3], found[4], found[5]}
end

-- The first place in an index that is not before a position and key.
local function place_of(index, position, key)
  local low = call('ZCOUNT', index, '-inf', '(' .. position)
  local high = call('ZCOUNT', index, '-inf', position)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if call('ZRANGE', index, middle, middle)[1] < key then low = middle + 1 else high = middle end
  end
  return low
end

local A = ARGV
local operations = {}

function operations.put()
  local tenants, all = {}, 1
  for at = 5, #A, 7 do
    if has_place(A[at], A[at + 1], A[at + 4]) then
      write(A[at], A[at + 1], A[at + 2], A[at + 3], A[at + 4], A[at + 5], A[at + 6], A[2] + (at - 5) / 7)
    else
      all = 0
    end
    if GROUPS[A[at]] == KEPT then tenants[#tenants + 1] = A[at + 1] end
  end
  for _, tenant in ipairs(tenants) do make_room(tenant, A[3], A[4]) end
  return all
end

function operations.add()
  if call('EXISTS', key_of(A[5], A[6], A[7])) == 1 then return 0 end
  return operations.put()
end

function operations.swap()
  local version = call('HGET', key_of(A[3], A[4], A[5]), 'version')
  if not version or tonumber(version) ~= tonumber(A[10]) or not has_place(A[3], A[4], A[7]) then return 0 end
  write(A[3], A[4], A[5], A[6], A[7], A[8], A[9], A[2])
  return 1
end

function operations.get() return read(A[2], A[3], A[4]) end

function operations.chain()
  local found, seen, key, held = {}, {}, A[5], 0
  while key ~= '' and not seen[key] and #found < tonumber(A[6]) and held < MOST_AT_ONCE do
    seen[key] = true
    local record = read(A[3], A[4], key)
    if not record then break end
    found[#found + 1] = record
    held = held + #record[4]
    key = record[5]
  end
  for at, record in ipairs(found) do use(A[3], A[4], record[3], A[2] + at - 1) end
  return found
end

function operations.below()
  local index, limit, newest = below_of(A[2], A[3], A[4]), tonumber(A[5]), A[6] == '1'
  local keys
  if newest then
    local last = A[7] and place_of(index, A[7], A[8]) - 1 or call('ZCARD', index) - 1
    keys = {}
    if last >= 0 then
      local some = call('ZRANGE', index, math.max(0, last - limit + 1), last)
      for at = #some, 1, -1 do keys[#keys + 1] = some[at] end
    end
  else
    local first = 0
    if A[7] then
      first = place_of(index, A[7], A[8])
      local there = call('ZRANGE', index, first, first, 'WITHSCORES')
      if there[1] == A[8] and tonumber(there[2]) == tonumber(A[7]) then first = first + 1 end
    end
    keys = call('ZRANGE', index, first, first + limit - 1)
  end
  local found, held = {}, 0
  for _, key in ipairs(keys) do
    if held >= MOST_AT_ONCE then break end
    local record = read(A[2], A[3], key)
    found[#found + 1] = record
    held = held + #record[4]
  end
  return found
end

function operations.positions()
  return call('ZRANGE', below_of(A[2], A[3], A[4]), 0, -1, 'WITHSCORES')
end

function operations.every()
  local found = {}
  for _, place in ipairs(call('ZRANGEBYLEX', P .. 'k:' .. A[2], A[4], '+', 'LIMIT', 0, A[3])) do
    local tenant, key = string.match(place, '^(%Z*)%z(.*)$')
    found[#found + 1] = read(A[2], tenant, key)
  end
  return found
end

function operations.delete() return drop(A[2], A[3], A[4]) end

function operations.empty()
  for _, key in ipairs(call('ZRANGE', below_of(A[2], A[3], A[4]), 0, -1)) do drop(A[2], A[3], key) end
  return 1
end

function operations.forget()
  local gone = 0
  for _, place in ipairs(call('SMEMBERS', P .. 't:' .. A[2])) do
    local kind, key = string.match(place, '^(%Z*)%z(.*)$')
    gone = gone + 1
    drop(kind, A[2], key)
  end
  return gone
end

function operations.total()
  local bytes = call('ZSCORE', P .. 's:' .. A[3], A[2])
  return {tonumber(call('HGET', P .. 'n:' .. A[3], A[2]) or 0), tonumber(bytes or 0)}
end

function operations.sweep()
  local gone = call('ZRANGEBYSCORE', P .. 'x', '-inf', A[2], 'LIMIT', 0, A[4])
  if tonumber(A[3]) > 0 and #gone < tonumber(A[4]) then
    for _, place in ipairs(call('ZRANGEBYSCORE', P .. 'u', '-inf', A[3], 'LIMIT', 0, A[4] - #gone)) do gone[#gone + 1] = place end
  end
  for _, place in ipairs(gone) do
    local kind, tenant, key = string.match(place, '^(%Z*)%z(%Z*)%z(.*)$')
    drop(kind, tenant, key)
  end
  return #gone
end

return operations[A[1]]()
""",
    )
)


class RedisStore:
    """Implements :class:`Store`.

    Args:
        url: ``redis://`` or ``rediss://`` (TLS), as redis-py takes it.
        retention: What goes when.
        clock: Seconds since 1970.
    """

    def __init__(self, url: str, retention: Retention, clock: Callable[[], float] = time.time) -> None:
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=_MOST_CONNECTIONS,
            timeout=_ANSWER_SECONDS,
            socket_connect_timeout=_CONNECT_SECONDS,
            socket_timeout=_ANSWER_SECONDS,
            health_check_interval=30,
        )
        self._client = redis.Redis.from_pool(pool)
        self._script = self._client.register_script(_SCRIPT)
        self._retention = retention
        self._clock = clock
        self._latest = 0
        self._closed = False

    async def put(self, records: Sequence[Record]) -> bool:
        """See :class:`Store`."""
        return not records or bool(await self._put("put", records))

    async def add(self, record: Record) -> bool:
        """See :class:`Store`."""
        return bool(await self._put("add", [record]))

    async def swap(self, record: Record) -> bool:
        """See :class:`Store`."""
        return bool(await self._run("swap", self._now(), *_parts(record), record.version))

    async def get(self, kind: str, tenant: str, key: str) -> Record | None:
        """See :class:`Store`."""
        if not can_be_key(key):
            return None
        found = await self._run("get", kind, tenant, key)
        return None if found is None else _record(found)

    async def chain(self, kind: str, tenant: str, key: str, most: int) -> list[Record]:
        """See :class:`Store`."""
        if not can_be_key(key):
            return []
        return [_record(each) for each in await self._run("chain", self._now(most), kind, tenant, key, most)]

    async def below(
        self,
        kind: str,
        tenant: str,
        parent: str,
        *,
        after: tuple[int, str] | None = None,
        limit: int = 100,
        newest_first: bool = False,
    ) -> list[Record]:
        """See :class:`Store`."""
        if not can_be_key(parent):
            return []
        found = await self._run("below", kind, tenant, parent, limit, int(newest_first), *(after or ()))
        return [_record(each) for each in found]

    async def positions(self, kind: str, tenant: str, parent: str) -> list[int]:
        """See :class:`Store`."""
        if not can_be_key(parent):
            return []
        return [int(float(each)) for each in (await self._run("positions", kind, tenant, parent))[1::2]]

    async def every(self, kind: str, *, after: tuple[str, str] | None = None, limit: int = 100) -> list[Record]:
        """See :class:`Store`."""
        beyond = "-" if after is None else f"({after[0]}\0{after[1]}"
        return [_record(each) for each in await self._run("every", kind, limit, beyond)]

    async def delete(self, kind: str, tenant: str, key: str) -> bool:
        """See :class:`Store`."""
        return can_be_key(key) and bool(await self._run("delete", kind, tenant, key))

    async def empty(self, kind: str, tenant: str, parent: str) -> None:
        """See :class:`Store`."""
        await self._run("empty", kind, tenant, parent)

    async def forget(self, tenant: str) -> int:
        """See :class:`Store`."""
        return int(await self._run("forget", tenant))

    async def total(self, tenant: str, group: str) -> tuple[int, int]:
        """See :class:`Store`."""
        count, size = await self._run("total", tenant, group)
        return int(count), int(size)

    async def sweep(self) -> None:
        """See :class:`Store`."""
        now, seconds = self._clock(), self._retention.seconds
        before = int((now - seconds) * 1e6) if seconds else 0
        while await self._run("sweep", int(now), before, _SWEPT_AT_ONCE) == _SWEPT_AT_ONCE:
            pass

    async def close(self) -> None:
        """See :class:`Store`."""
        self._closed = True
        await self._client.aclose()

    async def _put(self, operation: str, records: Sequence[Record]) -> Any:
        parts = [part for record in records for part in _parts(record)]
        bounds = self._retention.most, self._retention.most_bytes
        return await self._run(operation, self._now(len(records)), *bounds, *parts)

    async def _run(self, operation: str, *arguments: str | int | bytes) -> Any:
        if self._closed:
            raise UnavailableError("the store is closed")
        try:
            return await self._script(args=[operation, *arguments])
        except (RedisError, OSError) as error:
            raise UnavailableError(f"the store does not answer: {error}", retry_after=1.0) from error

    def _now(self, count: int = 1) -> int:
        """Microseconds, later than any before, with ``count`` of them for this call."""
        now = max(self._latest + 1, int(self._clock() * 1e6))
        self._latest = now + count
        return now


def _parts(record: Record) -> tuple[str | int | bytes, ...]:
    return (
        *(record.kind, record.tenant, record.key, record.body),
        *(record.parent, record.position, record.expires),
    )


def _record(found: Sequence[bytes]) -> Record:
    kind, tenant, key, body, parent, position, expires, version = found
    texts = kind.decode(), tenant.decode(), key.decode()
    return Record(*texts, body, parent.decode(), int(position), int(expires), int(version))
