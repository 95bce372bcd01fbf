"""Who starts and stops workers: Kubernetes, or this process on this machine; or nobody, where others read the plan's gauge."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sapwood.cli.errors import REFUSED, CliError
from sapwood.cli.local.child import Child

logger = logging.getLogger(__name__)


class Driver(Protocol):
    """Changes how many workers of one role there are."""

    async def scale(self, wanted: int, serving: Sequence[str], busy: Sequence[str]) -> None:
        """There should be so many workers. Called at each look, also where nothing changed.

        Args:
            wanted: How many.
            serving: Addresses of the role's workers that take requests.
            busy: Addresses of workers of the role that have requests.
        """
        ...

    async def close(self) -> None:
        """No more is asked of it."""
        ...


class NoDriver:
    """Only tells how many there should be."""

    async def scale(self, wanted: int, serving: Sequence[str], busy: Sequence[str]) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""


class KubernetesDriver:
    """Sets the replicas of a StatefulSet or Deployment by its scale subresource. A pod that has to go drains at SIGTERM.

    Args:
        api: The official client's ``AppsV1Api``.
        target: ``NAMESPACE/statefulset/NAME`` or ``NAMESPACE/deployment/NAME``.

    Raises:
        CliError: The target is none.
    """

    def __init__(self, api: Any, target: str) -> None:
        namespace, kind, name = [*target.split("/"), "", ""][:3]
        kinds = {"statefulset": "stateful_set", "deployment": "deployment"}
        if target.count("/") != 2 or kind not in kinds or not namespace or not name:
            raise CliError(
                f"--kubernetes: {target!r} is not NAMESPACE/statefulset/NAME or NAMESPACE/deployment/NAME", REFUSED
            )
        self._read = getattr(api, f"read_namespaced_{kinds[kind]}_scale")
        self._patch = getattr(api, f"patch_namespaced_{kinds[kind]}_scale")
        self._where = {"name": name, "namespace": namespace, "_request_timeout": 10}
        self._target = target

    async def scale(self, wanted: int, serving: Sequence[str], busy: Sequence[str]) -> None:
        """Patches the scale if it is another. An API server that is away is asked again at the next look."""
        try:
            found = await asyncio.to_thread(self._read, **self._where)
            if (found.spec.replicas or 0) != wanted:
                await asyncio.to_thread(self._patch, body={"spec": {"replicas": wanted}}, **self._where)
                logger.info("%s: %s replicas, was %s", self._target, wanted, found.spec.replicas or 0)
        except Exception as error:  # its own, urllib3's and the system's
            logger.warning("%s: %s", self._target, str(error).splitlines()[0] if str(error) else type(error).__name__)

    async def close(self) -> None:
        """Leaves the replicas as they are."""


def kubernetes_api() -> Any:
    """The official client, with the pod's service account or the user's configuration.

    Raises:
        CliError: The package is not installed, or there is no cluster.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        raise CliError("--kubernetes needs: pip install 'sapwood[kubernetes]'", REFUSED) from None
    try:
        config.load_config()  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        raise CliError(f"--kubernetes: {error}", REFUSED) from None
    return client.AppsV1Api()


@dataclass
class _Local:
    """A worker of this process's.

    Attributes:
        child: Its process.
        address: Where it listens; "": it has not said yet.
        leaving: Whether it is to end once it has no requests.
        idle: Looks since it was drained at which it had none.
    """

    child: Child
    address: str = ""
    leaving: bool = False
    idle: int = 0


class Operators(Protocol):
    """What is asked of the router."""

    async def register(self, address: str) -> None:
        """There is this worker, for some looks."""
        ...

    async def drain(self, address: str, *, undo: bool = False) -> None:
        """It gets nothing new; other workers inherit what it has cached."""
        ...

    async def remove(self, address: str) -> None:
        """It is gone."""
        ...


class LocalDriver:
    """Starts workers on this machine besides those that a router has, and ends those it has started: the newest first, drained.

    Args:
        router: Learns of them.
        flags: Of each worker.
        on_line: Gets name and text of what workers write.
    """

    def __init__(self, router: Operators, flags: Sequence[str], on_line: Callable[[str, str], None]) -> None:
        self._router = router
        self._flags = ("--port", "0", "--metrics-port", "0", *flags)
        self._on_line = on_line
        self._workers: list[_Local] = []
        self._started = 0

    async def scale(self, wanted: int, serving: Sequence[str], busy: Sequence[str]) -> None:
        """Starts or drains some, ends those that are drained, and tells the router again of those that are there."""
        for worker in [each for each in self._workers if each.child.exited.is_set()]:
            logger.warning("%s ended: %s", worker.child.name, next(reversed(worker.child.last_lines), ""))
            self._workers.remove(worker)
            await self._forget(worker)
        own = {each.address for each in self._workers if each.address}
        others = sum(address not in own for address in serving)
        staying = [each for each in self._workers if not each.leaving]
        target = max(0, wanted - others)
        while len(staying) > target:
            worker = staying.pop()
            worker.leaving, worker.idle = True, 0
            logger.info("%s drains", worker.child.name)
            if worker.address:
                await self._router.drain(worker.address)
        for worker in [each for each in self._workers if each.leaving]:
            if len(staying) < target:  # it is needed again before it is gone
                worker.leaving = False
                staying.append(worker)
                if worker.address:
                    await self._router.drain(worker.address, undo=True)
        for _ in range(target - len(staying)):
            await self._start()
        for worker in [*self._workers]:
            await self._look_after(worker, busy)

    async def close(self) -> None:
        """Ends all of them, each as soon as it has finished its requests."""
        for worker in self._workers:
            worker.child.signal(signal.SIGTERM)
        await asyncio.gather(*(each.child.exited.wait() for each in self._workers))
        for worker in self._workers:
            await self._forget(worker)

    async def _start(self) -> None:
        self._started += 1
        name = f"scaled-{self._started}"
        logger.info("%s starts", name)
        self._workers.append(_Local(await Child.start(name, "sapwood_worker", self._flags, self._on_line)))

    async def _look_after(self, worker: _Local, busy: Sequence[str]) -> None:
        if not worker.address:
            with contextlib.suppress(TimeoutError):
                found = await asyncio.wait_for(worker.child.address(), 0.05)
                worker.address = found or ""
            if not worker.address and not worker.leaving:
                return
        if not worker.leaving:
            await self._router.register(worker.address)
            return
        worker.idle = 0 if worker.address in busy else worker.idle + 1
        if worker.idle > 1 or not worker.address:  # its last report may be older than its last request
            logger.info("%s ends", worker.child.name)
            worker.child.signal(signal.SIGTERM)
            self._workers.remove(worker)
            await worker.child.exited.wait()
            await self._forget(worker)

    async def _forget(self, worker: _Local) -> None:
        if worker.address:
            try:
                await self._router.remove(worker.address)
            except Exception as error:  # its lease ends, too
                logger.debug("%s: %s", worker.address, error)
