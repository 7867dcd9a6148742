"""What replicas say, in real seconds of their own clocks, as moments of the scheduler's clock in pool time."""

from pathlib import Path

import pytest
from live_work import commit, damage_newest

from vla_rlaif.pool.board import Entry
from vla_rlaif.pool.clock import MINUTE, SECOND
from vla_rlaif.pool.committed import committed_step, committed_version, load_committed, newest_name, verify_newest
from vla_rlaif.pool.live_clock import LiveClock, read_clock, start_clock
from vla_rlaif.pool.observe import SILENT_S, Heard, p99_ms, replica_of
from vla_rlaif.pool.replica import Claim, Report, Status
from vla_rlaif.pool.state import Gpu, Phase, Replica

CLOCK = LiveClock(speed=60.0)  # a second is a pool minute
NOW = 1000 * MINUTE
CLAIM = Claim(replica="a", role="serve", gpus=(Gpu("n0", 0),))


def entry(age_s: float = 9.0, leaving_s: float | None = None) -> Entry:
    return Entry(claim=CLAIM, age_s=age_s, is_created=True, leaving_s=leaving_s, kill=False)


def status(phase: Phase = Phase.ACTIVE, *, age_s: float = 4.0, leaving_s: float | None = None, **report) -> Status:
    return Status(
        **{"claim": CLAIM, "phase": phase, "age_s": age_s, "leaving_s": leaving_s, "attempts": 2, "is_over": False},
        **{"took": (), "report": Report(**report), "gpu_ids": (), "error": None},
    )


def observed(heard: Heard, version: int = 7, saved_s: float | None = None, **changes: float) -> Replica:
    return replica_of(entry(**changes), heard, clock=CLOCK, now=NOW, version=version, saved_s=saved_s)


def test_ages_are_moments_in_pool_time() -> None:
    replica = observed(Heard(status=status(leaving_s=2.0, version=7, syncing_s=0.5), silent_s=1.0))
    assert replica.since == NOW - 5 * MINUTE  # 4 s in the phase when it spoke, 1 s ago
    assert replica.leaving == NOW - 3 * MINUTE
    assert replica.acquired == NOW - 9 * MINUTE
    assert replica.syncing_since == NOW - 30 * SECOND
    assert (replica.phase, replica.attempts, replica.saved) == (Phase.ACTIVE, 2, None)


def test_work_at_risk_began_with_the_last_checkpoint_or_with_the_work() -> None:
    assert observed(Heard(status=status()), saved_s=3.0).saved == NOW - 3 * MINUTE
    assert observed(Heard(status=status()), saved_s=50.0).saved == NOW - 4 * MINUTE
    assert observed(Heard(status=status(Phase.DRAINING)), saved_s=50.0).saved == NOW - 50 * MINUTE


@pytest.mark.parametrize(
    ("heard", "phase"),
    [
        (Heard(), Phase.ACQUIRING),  # its actor has not answered yet
        (Heard(is_dead=True), Phase.LOST),
        (Heard(status=status(), is_dead=True), Phase.LOST),
        (Heard(status=status(), silent_s=SILENT_S - 1), Phase.ACTIVE),
        (Heard(status=status(), silent_s=SILENT_S + 1), Phase.LOST),
    ],
)
def test_what_does_not_answer_is_starting_or_lost(heard: Heard, phase: Phase) -> None:
    assert observed(heard).phase is phase


def test_a_release_that_was_ordered_counts_even_if_the_replica_has_not_heard_of_it() -> None:
    replica = observed(Heard(status=status()), leaving_s=3.0)
    assert (replica.phase, replica.since, replica.leaving) == (Phase.RELEASING, NOW - 3 * MINUTE, NOW - 3 * MINUTE)


def test_weights_newer_than_the_look_are_not_synced_back() -> None:
    assert observed(Heard(status=status(version=9)), version=7).version == 7
    assert observed(Heard(status=status(version=5)), version=7).version == 5


def test_p99_is_of_the_requests_since_the_last_look() -> None:
    """Before: 900 up to 10 ms. Since then: 98 up to 10 ms, 1 up to 50 ms, 1 above."""
    bounds = (0.01, 0.05, float("inf"))
    old = {"a": tuple(zip(bounds, (900.0, 900.0, 900.0), strict=True))}
    now = {"a": status(latency=tuple(zip(bounds, (998.0, 999.0, 1000.0), strict=True)))}
    assert p99_ms(old, now) == 50.0
    assert p99_ms({}, now) == 10.0  # 998 of 1000
    assert p99_ms({"a": now["a"].report.latency}, now) is None  # nobody asked


def test_a_rehearsals_clock_is_the_same_for_every_scheduler(tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    clock = start_clock(path, pool=5 * MINUTE, speed=60.0)
    assert read_clock(path) == clock
    assert 0 <= clock.now() - 5 * MINUTE < 10 * MINUTE
    assert clock.seconds(clock.micros(1.5)) == 1.5
    path.write_text('{"real": 0, "pool": 0, "speed": 0}')
    with pytest.raises(ValueError, match="speed is 0"):
        read_clock(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="no clock of a rehearsal"):
        read_clock(path)


def test_committed_weights_are_those_of_the_newest_checkpoint(tmp_path: Path) -> None:
    assert (committed_version(tmp_path), committed_step(tmp_path), newest_name(tmp_path)) == (0, 0, "")
    assert load_committed(tmp_path).trained == {}
    verify_newest(tmp_path)  # nothing to lose
    for version in (3, 8):
        commit(tmp_path, version)
    assert (committed_version(tmp_path), committed_step(tmp_path)) == (8, 8)
    committed = load_committed(tmp_path)
    assert (committed.version, committed.step) == (8, 8)
    assert (committed.trained["bias"] == 8).all() and (committed.average["bias"] == 4).all()
    damage_newest(tmp_path)
    assert committed_version(tmp_path) == 3
    assert load_committed(tmp_path).version == 3
    with pytest.raises(ValueError, match="cannot be used"):
        verify_newest(tmp_path)
