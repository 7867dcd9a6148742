"""Memory that other processes of this machine map. It has no name in any file system, so nothing is left behind when a
process is killed, and the size of /dev/shm does not matter: the kernel frees it with its last user."""

import mmap
import os
import secrets
import weakref
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from vla_rlaif.dist.manifest import Bytes, Manifest
from vla_rlaif.dist.tickets import NOTHING, WHOLE, Desk, Share
from vla_rlaif.dist.views import Views


class Segment:
    """Memory that others may map. ``token`` tells it from any other."""

    def __init__(self, num_bytes: int) -> None:
        self.token = secrets.token_hex(8)
        self._fd = os.memfd_create(_label(self.token))
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, num_bytes)
        self.memory: Bytes = np.frombuffer(mmap.mmap(self._fd, num_bytes), np.uint8)

    def ticket(self, others: Collection[str]) -> "SharedTicket":
        """``others``: tokens of segments that are in use besides this one."""
        return SharedTicket(pid=os.getpid(), fd=self._fd, token=self.token, others=frozenset(others))


class Rooms:
    """Segments that are used again from round to round."""

    def __init__(self) -> None:
        self._rooms: list[Segment] = []

    @property
    def tokens(self) -> frozenset[str]:
        return frozenset(room.token for room in self._rooms)

    def take(self, num_bytes: int, busy: Collection[str]) -> Segment:
        """A room that nobody uses; ``busy`` are the tokens of those in use. Others of another size are freed."""
        self._rooms = [room for room in self._rooms if room.token in busy or len(room.memory) == num_bytes]
        for room in self._rooms:
            if room.token not in busy:
                return room
        self._rooms.append(Segment(num_bytes))
        return self._rooms[-1]


@dataclass(frozen=True, kw_only=True)
class SharedTicket:
    """A payload in a segment. It is not copied: who stages it holds the segment, and its owner does not write to one
    that is held. All receivers see the same pages, so each checks a part of them; what all parts together have found
    counts. What the owner has received and checked itself is not checked again."""

    pid: int
    fd: int
    token: str
    others: frozenset[str]
    share: Share = WHOLE

    @property
    def is_checked(self) -> bool:
        return self.share == NOTHING

    def shared(self, of: int) -> "list[SharedTicket]":
        """One for each of so many receivers, who check it together."""
        return [replace(self, share=Share(start=index, stop=index + 1, of=of)) for index in range(of)]

    def fetch(self, manifest: Manifest, desk: Desk) -> Bytes:
        memory = self.view(manifest.num_bytes, desk.views)
        desk.check.only(self.share)
        desk.check.up_to(memory, len(memory))
        return memory

    def view(self, num_bytes: int, views: Views) -> Bytes:
        """Changes to it stay private, so that a policy may share its memory."""
        return views.get(self.token, self.others, lambda: self._map(num_bytes))

    def _map(self, num_bytes: int) -> Bytes:
        path = f"/proc/{self.pid}/fd/{self.fd}"
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ValueError(
                f"the memory of process {self.pid} cannot be mapped ({error}): it has ended, belongs to another user, "
                "or runs in another container. Set sync.transport to process_group."
            ) from None
        try:
            label = os.readlink(f"/proc/self/fd/{fd}")
            if _label(self.token) not in label or os.fstat(fd).st_size != num_bytes:
                raise ValueError(
                    f"{path} is {label}, not segment {self.token} of {num_bytes} bytes: its owner has ended."
                )
            return np.frombuffer(mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY), np.uint8)
        finally:
            os.close(fd)


def _label(token: str) -> str:
    return f"vla_rlaif-{token}"
