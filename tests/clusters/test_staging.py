"""A receiver by itself: what each call does, in every order."""

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from vla_rlaif.dist.link import LinkError, Links
from vla_rlaif.dist.manifest import Manifest, ManifestError, lay_out, layout_of
from vla_rlaif.dist.payload import pack
from vla_rlaif.dist.shared_memory import Segment
from vla_rlaif.dist.staging import Receiver
from vla_rlaif.dist.tickets import Desk, Share


@dataclass(frozen=True)
class Handed:
    """A ticket that has the bytes with it, and waits for ``go``."""

    memory: np.ndarray
    go: threading.Event = field(default_factory=threading.Event)
    token: str = ""

    def fetch(self, manifest: Manifest, desk: Desk) -> np.ndarray:
        room = desk.room(manifest.num_bytes)
        assert self.go.wait(10)
        room[:] = self.memory
        desk.check.up_to(room, len(room))
        return room


def payload(value: float, serial: int, version: int = 0, **changes: Any) -> tuple[Manifest, Handed]:
    weights = {"w": np.full((3, 5), value, np.float32)}
    entries, num_bytes = lay_out(layout_of(weights), wire="float32")
    memory = np.zeros(num_bytes, np.uint8)
    fields: dict[str, Any] = {"base": "", "is_base": False, **changes}
    sums = pack(weights, entries, memory, threads=1)
    manifest = Manifest(serial=serial, version=version, entries=entries, num_bytes=num_bytes, checksums=sums, **fields)
    ticket = Handed(memory)
    ticket.go.set()
    return manifest, ticket


class Seen:
    def __init__(self) -> None:
        self.loads: list[tuple[int, float]] = []
        self.arrays: list[np.ndarray] = []
        self.receiver = Receiver(self.load, threads=1)

    def load(self, weights: Any, version: int) -> None:
        self.loads.append((version, float(weights["w"][0, 0])))
        self.arrays.append(weights["w"])

    def stage(self, value: float, serial: int, version: int = 0) -> bool:
        manifest, ticket = payload(value, serial, version)
        self.receiver.stage(manifest, ticket)
        vote = self.receiver.vote(serial, 10.0)
        return vote is not None and vote.is_yes and vote.checksums == manifest.checksums


def test_stage_vote_commit_adopt():
    seen = Seen()
    assert seen.receiver.version == -1 and not seen.receiver.adopt()
    assert seen.stage(0.5, serial=3, version=7)
    assert not seen.receiver.adopt() and seen.loads == []  # staged is not committed
    holding = seen.receiver.commit(3)
    assert (holding.version, holding.acting, holding.tokens) == (7, -1, frozenset())
    assert seen.receiver.version == -1  # committed is not acting
    assert seen.receiver.adopt() and not seen.receiver.adopt()
    assert seen.loads == [(7, 0.5)] and seen.receiver.version == 7


def test_a_commit_that_is_repeated_changes_nothing():
    seen = Seen()
    assert seen.stage(0.5, serial=1)
    first = seen.receiver.commit(1)
    assert seen.receiver.commit(1) == first
    seen.receiver.adopt()
    assert seen.receiver.commit(1).acting == 0 and not seen.receiver.adopt()


@pytest.mark.parametrize("what", ["never staged", "another", "aborted", "not yet there", "damaged"])
def test_a_commit_of_what_is_not_there(what):
    seen = Seen()
    manifest, ticket = payload(0.5, 4)
    if what == "damaged":
        ticket.memory[0] ^= 1
    if what == "not yet there":
        ticket.go.clear()
    if what != "never staged":
        seen.receiver.stage(manifest, ticket)
        vote = seen.receiver.vote(4, 0.0 if what == "not yet there" else 10.0)
        assert (vote is None) == (what == "not yet there")
        assert vote is None or vote.is_yes == (what != "damaged")
    if what == "aborted":
        seen.receiver.abort()
    with pytest.raises(ValueError, match="cannot be committed"):
        seen.receiver.commit(5 if what == "another" else 4)
    ticket.go.set()
    assert not seen.receiver.adopt() and seen.loads == []


def test_a_newer_version_replaces_one_that_never_acted():
    seen = Seen()
    for serial in (1, 2, 3):
        assert seen.stage(serial, serial, version=serial)
        seen.receiver.commit(serial)
    seen.receiver.adopt()
    assert seen.loads == [(3, 3.0)]


def test_staging_anew_gives_up_what_was_staged():
    seen = Seen()
    manifest, slow = payload(1.0, 1)
    slow.go.clear()
    seen.receiver.stage(manifest, slow)
    assert seen.receiver.vote(1, 0.01) is None
    assert seen.stage(2.0, 2)  # in other memory: the first one still has its own
    slow.go.set()
    vote = seen.receiver.vote(1, 0.1)
    assert vote is not None and "not being staged" in vote.problem
    seen.receiver.commit(2)
    seen.receiver.adopt()
    assert seen.loads == [(0, 2.0)]


def test_what_was_loaded_stays_until_the_next_is():
    """Three rooms go round; a policy that shares the memory of its weights never sees them change."""
    seen = Seen()
    for serial in range(1, 20):
        assert seen.stage(float(serial), serial, version=serial)
        seen.receiver.commit(serial)
        if serial % 3:
            seen.receiver.adopt()
        assert seen.arrays[-1][0, 0] == seen.loads[-1][1]
        assert seen.stage(-1.0, 1000 + serial)  # staged and given up
        assert seen.arrays[-1][0, 0] == seen.loads[-1][1]
    places = {array.__array_interface__["data"][0] for array in seen.arrays}
    assert len(places) <= 3


def test_a_load_that_raises_is_tried_again():
    seen, fails = Seen(), [True]

    def load(weights: Any, version: int) -> None:
        if fails.pop(0):
            raise RuntimeError("out of memory")
        seen.load(weights, version)

    seen.receiver = Receiver(load, threads=1)
    assert seen.stage(0.5, 1, version=2)
    seen.receiver.commit(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        seen.receiver.adopt()
    assert seen.receiver.version == -1  # never the number before the weights
    fails.append(False)
    assert seen.receiver.adopt() and seen.receiver.version == 2


def test_the_manifest_is_checked_before_anything_is_fetched():
    seen = Seen()
    receiver = Receiver(seen.load, expected={"v": ("float32", (3, 5))}, threads=1)
    manifest, ticket = payload(1.0, 1)
    with pytest.raises(ManifestError):
        receiver.stage(manifest, ticket)
    with pytest.raises(ManifestError):
        receiver.check(manifest)
    assert seen.receiver.check(manifest) == manifest.digest


def test_a_segment_is_mapped_and_not_copied():
    manifest, handed = payload(0.5, 1)
    segment = Segment(manifest.num_bytes)
    segment.memory[:] = handed.memory
    seen = Seen()
    seen.receiver.stage(manifest, segment.ticket(others=()))
    vote = seen.receiver.vote(1, 10.0)
    assert vote is not None and vote.is_yes
    assert seen.receiver.commit(1).tokens == {segment.token}
    seen.receiver.adopt()
    segment.memory[:4].view(np.float32)[:] = 9.0
    assert seen.arrays[0][0, 0] == 9.0  # the very memory: the sender must not write while it is held
    seen.arrays[0][0, 1] = 4.0
    assert segment.memory[4:8].view(np.float32)[0] == 0.5  # and the receiver cannot
    manifest, ticket = payload(1.5, 2)
    seen.receiver.stage(manifest, ticket)
    seen.receiver.vote(2, 10.0)
    assert seen.receiver.commit(2).tokens == {segment.token}
    seen.receiver.adopt()
    assert seen.receiver.commit(2).tokens == frozenset()


def test_a_segment_that_the_policy_wrote_to_is_mapped_anew():
    """Its pages would go on showing what was written, and an end that checks another part would not notice."""
    manifest, handed = payload(0.5, 1)
    segment, seen = Segment(manifest.num_bytes), Seen()
    for serial, wanted in ((1, 0.5), (2, 1.5), (3, 2.5)):
        manifest, handed = payload(wanted, serial)
        segment.memory[:] = handed.memory
        ticket = replace(segment.ticket(others=()), share=Share(start=0, stop=1, of=2))  # no part of the one block
        seen.receiver.stage(manifest, ticket)
        vote = seen.receiver.vote(serial, 10.0)
        assert vote is not None and vote.is_yes
        seen.receiver.commit(serial)
        seen.receiver.adopt()
        np.testing.assert_array_equal(seen.arrays[-1], np.full((3, 5), wanted, np.float32))
        if serial == 1:
            seen.arrays[-1][:] = 7.0
    assert not np.shares_memory(seen.arrays[0], seen.arrays[1]) and np.shares_memory(seen.arrays[1], seen.arrays[2])


@dataclass
class Ring:
    """A link for tests of Links: it only knows whether it has ended."""

    generation: int
    gate: threading.Event | None = None
    ended: bool = False

    def join(self) -> "Ring":
        if self.gate is not None:
            assert self.gate.wait(10)
        return self

    def abort(self) -> None:
        self.ended = True

    def send(self, memory: np.ndarray) -> None: ...

    def receive(self, memory: np.ndarray, arrived: Any) -> None: ...


def test_a_link_is_kept_until_a_newer_one_comes():
    links, first, second = Links(), Ring(1), Ring(2)
    assert links.join(first) is first and links.join(Ring(1)) is first
    assert links.join(second) is second and first.ended
    with pytest.raises(LinkError, match="generation 1 is over"):
        links.join(Ring(1))
    links.abort(1)  # late news of an old one
    assert not second.ended
    links.abort(2)
    assert second.ended
    with pytest.raises(LinkError):
        links.join(Ring(2))


def test_a_link_that_is_given_up_while_it_is_joined():
    links, slow, failed = Links(), Ring(5, threading.Event()), list[str]()

    def join() -> None:
        try:
            links.join(slow)
        except LinkError as error:
            failed.append(str(error))

    thread = threading.Thread(target=join)
    thread.start()
    while links._wanted != 5:
        pass
    links.abort(5)
    assert slow.gate is not None
    slow.gate.set()
    thread.join(10)
    assert slow.ended and "given up" in failed[0]
    newer = Ring(6)
    assert links.join(newer) is newer
