"""Networks of their own for processes that tests cut off; as root, on Linux."""

from __future__ import annotations

import itertools
import os
import subprocess

_numbers = itertools.count()


class Namespace:
    """A network of its own, of which this machine sees one address, and from which it can be cut off without a word.

    Attributes:
        name: For ``ip netns exec``.
        host: Its address.
    """

    def __init__(self) -> None:
        number = os.getpid() % 30_000 * 8 + next(_numbers) % 8
        self.name = f"sw{os.getpid()}n{number % 8}"
        self._link = f"sv{os.getpid() % 1_000_000}n{number % 8}"
        net = f"10.{200 + number // 16384 % 16}.{number // 64 % 256}.{number % 64 * 4}".rsplit(".", 1)
        first = int(net[1])
        self.host, here = f"{net[0]}.{first + 2}", f"{net[0]}.{first + 1}"
        self._ip("netns", "add", self.name)
        try:
            self._ip("link", "add", self._link, "type", "veth", "peer", "name", "inside", "netns", self.name)
            self._ip("addr", "add", f"{here}/30", "dev", self._link)
            self._ip("link", "set", self._link, "up")
            self._ip("-n", self.name, "addr", "add", f"{self.host}/30", "dev", "inside")
            for device in ("inside", "lo"):
                self._ip("-n", self.name, "link", "set", device, "up")
        except BaseException:
            self.close()
            raise

    def part(self) -> None:
        """From now on nothing passes in either direction."""
        self._ip("-n", self.name, "link", "set", "inside", "down")

    def swallow(self) -> None:
        """From now on packets of more than 200 bytes do not come in, nobody is told, and all others pass: a hole in the MTU."""
        self._ip("link", "set", self._link, "gso_max_segs", "1")
        self._ip("-n", self.name, "link", "set", "inside", "mtu", "200")

    def spit(self) -> None:
        """Large packets pass again."""
        self._ip("-n", self.name, "link", "set", "inside", "mtu", "1500")

    def mend(self) -> None:
        """All passes again."""
        self._ip("-n", self.name, "link", "set", "inside", "up")

    def close(self) -> None:
        """It is gone; to be called when nothing runs in it any more."""
        self._ip("netns", "del", self.name)

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
