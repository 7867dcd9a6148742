"""What outlives a scheduler, and who may act."""

import sqlite3
import threading

import pytest
from pool_worlds import factory

from vla_rlaif.pool.calendar import PAST
from vla_rlaif.pool.clock import DAY, HOUR, SECOND
from vla_rlaif.pool.lease import Fence, FileLease, Lease, claim
from vla_rlaif.pool.store import PoolStore, check_override, minimum_conflicts

NOW = 100 * DAY


def test_a_lease_is_held_renewed_and_taken_over():
    first = claim(None, holder="a", now=0, duration=10)
    assert first == Lease(holder="a", token=1, expires=10)
    assert claim(first, holder="b", now=9, duration=10) is None
    renewed = claim(first, holder="a", now=5, duration=10)
    assert renewed == Lease(holder="a", token=1, expires=15)
    # The clock of the holder went back: a lease never gets shorter by renewing it.
    assert claim(renewed, holder="a", now=0, duration=10) == renewed
    # Half-open: at its end it is free. Whoever takes it gets a higher token, the same holder too.
    assert claim(renewed, holder="b", now=15, duration=10) == Lease(holder="b", token=2, expires=25)
    assert claim(renewed, holder="a", now=15, duration=10) == Lease(holder="a", token=2, expires=25)


def test_a_scheduler_that_slept_through_its_lease_is_fenced_off():
    fence = Fence()
    assert fence.passes(1) and fence.passes(1)
    assert fence.passes(2)
    assert not fence.passes(1) and fence.passes(2)


def test_the_lease_file_has_one_holder(tmp_path):
    path = tmp_path / "pool" / "lease.json"
    a, b = FileLease(path), FileLease(path)
    assert a.read() is None
    assert a.claim(holder="a", now=NOW, duration=10 * SECOND) is not None
    assert b.claim(holder="b", now=NOW + SECOND, duration=10 * SECOND) is None
    assert b.read() == Lease(holder="a", token=1, expires=NOW + 10 * SECOND)
    b.give_up(holder="b", now=NOW + SECOND)  # not its own
    a.give_up(holder="a", now=NOW + 2 * SECOND)
    taken = b.claim(holder="b", now=NOW + 2 * SECOND, duration=10 * SECOND)
    assert taken == Lease(holder="b", token=2, expires=NOW + 12 * SECOND)


def test_many_schedulers_and_one_winner(tmp_path):
    won: list[Lease] = []

    def race(holder: str) -> None:
        lease = FileLease(tmp_path / "lease.json").claim(holder=holder, now=NOW, duration=SECOND)
        if lease is not None:
            won.append(lease)

    threads = [threading.Thread(target=race, args=(f"s{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and won[0].token == 1


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"holder": "a", "token": "x", "expires": 1}'])
def test_a_broken_lease_file_is_not_guessed_at(tmp_path, text):
    path = tmp_path / "lease.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"is not a lease .* make sure no scheduler runs, and remove it"):
        FileLease(path).claim(holder="a", now=0, duration=1)


def test_overrides_are_kept_cancelled_and_forgotten(tmp_path):
    path = tmp_path / "state" / "pool.sqlite"
    store = PoolStore(path)
    first = store.add(now=NOW, start=NOW, end=NOW + HOUR, use="night", targets={}, note="drill")
    second = store.add(now=NOW, start=NOW + HOUR, end=NOW + 3 * HOUR, use=None, targets={"serve": 32}, note="")
    assert PoolStore(path).overrides(now=NOW) == (first, second) and (first.id, second.id) == (1, 2)
    assert store.cancel(2, now=NOW + 2 * HOUR) == second
    # Cancelled while it was in force: it held until then. Cancelled before it began: it never was.
    assert store.overrides(now=NOW)[1].end == NOW + 2 * HOUR
    third = store.add(now=NOW, start=NOW + HOUR, end=NOW + 2 * HOUR, use="day", targets={}, note="")
    store.cancel(third.id, now=NOW)
    assert [o.id for o in store.overrides(now=NOW)] == [1, 2]
    assert store.overrides(now=NOW + PAST + 3 * HOUR) == ()
    with pytest.raises(ValueError, match="no override 3 is in force or to come; there are"):
        store.cancel(3, now=NOW)


def test_nobody_changes_an_override_behind_our_back(tmp_path):
    store = PoolStore(tmp_path / "pool.sqlite")
    store.add(now=NOW, start=NOW, end=NOW + HOUR, use="night", targets={}, note="")
    connection = sqlite3.connect(tmp_path / "pool.sqlite")
    for sql in ("UPDATE override SET end = end + 1", "DELETE FROM override"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(sql)
    connection.close()


def test_measured_durations_survive_a_restart(tmp_path):
    store = PoolStore(tmp_path / "pool.sqlite")
    store.add_durations([("serve", "warmup", i) for i in range(250)])
    store.add_durations([("train", "drain", 7)])
    kept = PoolStore(tmp_path / "pool.sqlite").durations()
    assert kept[:2] == [("serve", "warmup", 50), ("serve", "warmup", 51)] and kept[-1] == ("train", "drain", 7)
    assert len(kept) == 201


def test_a_file_of_something_else_is_refused(tmp_path):
    text = tmp_path / "text.sqlite"
    text.write_text("hello, this is no database at all, but long enough to be read")
    with pytest.raises(ValueError, match="is not a readable pool file"):
        PoolStore(text)
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE t (a)")
    connection.close()
    with pytest.raises(ValueError, match="SQLite file of another program"):
        PoolStore(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use": None}, "needs the name of shares"),
        ({"use": "nigth"}, r"no shares are called nigth; did you mean night\?"),
        ({"targets": {"serv": 3}}, r"no role is called serv; did you mean serve\?"),
        ({"targets": {"serve": 65}}, "serve cannot run on 65 of 64 GPUs"),
        ({"end": NOW}, "must end after it starts, and not in the past"),
        ({"start": NOW - 2 * HOUR, "end": NOW - HOUR}, "not in the past"),
        ({"end": NOW + 8 * DAY}, "an override lasts 7d at most, got 8d"),
    ],
)
def test_overrides_that_cannot_be_meant(changes, message):
    values = {"now": NOW, "start": NOW, "end": NOW + HOUR, "use": "night", "targets": {}} | changes
    with pytest.raises(ValueError, match=message):
        check_override(factory(), **values)


def test_the_minimum_wins_over_an_override():
    conflicts = minimum_conflicts(factory(), ["day", "night", "day"], {"serve": 8, "train": 8})
    assert conflicts == ["serve=8 is below its min of 16 in day, which stays"]
