"""Fleet health by hand, and against what must hold whatever happens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rlaif.dist.fleet import Fleet, Health

NAMES = ("a/0", "a/1", "a/2")


class Clock:
    """Stands still unless it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> Fleet:
    return Fleet(NAMES, clock=clock, suspect_s=5.0, dead_s=10.0)


def test_silence_makes_suspect_then_dead_and_a_sign_of_life_heals_only_the_suspect(clock: Clock, fleet: Fleet) -> None:
    clock.now = 4.0
    fleet.heard("a/0", 0)
    clock.now = 6.0
    assert fleet.look() == ()
    assert [fleet.health(name) for name in NAMES] == [Health.HEALTHY, Health.SUSPECT, Health.SUSPECT]
    fleet.heard("a/1", 0)
    assert fleet.health("a/1") is Health.HEALTHY
    clock.now = 13.0
    assert fleet.look() == ("a/2",)
    assert fleet.look() == ()  # told once
    fleet.heard("a/2", 0)
    assert fleet.health("a/2") is Health.DEAD
    assert fleet.living == ("a/0", "a/1")
    assert fleet.membership_epoch == 1


def test_a_restarted_worker_is_stale_until_it_holds_the_committed_version(fleet: Fleet) -> None:
    fleet.commit(3)
    for name in NAMES[:2]:
        fleet.holds(name, 0, 3)
    assert fleet.having(Health.STALE) == ("a/2",)
    fleet.holds("a/2", 0, 3)
    fleet.lost("a/2", 0)
    assert fleet.restarted("a/2") == 1
    assert fleet.health("a/2") is Health.STALE
    fleet.holds("a/2", 0, 3)  # late news of the one that died
    fleet.holds("a/2", 1, 2)
    assert fleet.health("a/2") is Health.STALE
    fleet.holds("a/2", 1, 3)
    assert fleet.having(Health.HEALTHY) == NAMES


def test_a_built_worker_counts_as_stale_even_before_the_first_commit(fleet: Fleet) -> None:
    fleet.lost("a/0", 0)
    fleet.restarted("a/0")
    assert fleet.health("a/0") is Health.STALE


def test_news_of_the_dead_change_nothing(fleet: Fleet) -> None:
    fleet.lost("a/0", 0)
    fleet.lost("a/0", 0)
    assert fleet.membership_epoch == 1
    fleet.restarted("a/0")
    fleet.lost("a/0", 0)  # of the first incarnation
    assert fleet.health("a/0") is Health.STALE
    assert fleet.membership_epoch == 2


def test_only_the_dead_come_back(fleet: Fleet) -> None:
    with pytest.raises(AssertionError, match="only the dead come back"):
        fleet.restarted("a/1")
    with pytest.raises(ValueError, match="suspect after 9 s, dead after 3 s"):
        Fleet(NAMES, clock=Clock(), suspect_s=9.0, dead_s=3.0)


EVENT = st.one_of(
    st.tuples(st.just("wait"), st.floats(0, 6)),
    st.tuples(st.sampled_from(["heard", "lost", "restart", "look", "commit"]), st.integers(0, 2)),
    st.tuples(st.just("holds"), st.integers(0, 2)),
)


@settings(max_examples=300)
@given(events=st.lists(st.tuples(EVENT, st.integers(0, 1)), max_size=60))
def test_what_holds_whatever_happens(events: list[tuple[tuple[str, float], int]]) -> None:
    clock = Clock()
    fleet = Fleet(NAMES, clock=clock, suspect_s=5.0, dead_s=10.0)
    sets: dict[int, frozenset[tuple[str, int]]] = {}  # membership epoch -> who lived
    changes, before = 0, fleet.members()
    for (what, value), behind in events:
        name = NAMES[int(value) % 3]
        incarnation = fleet.members()[name].incarnation - behind  # some news come late
        if what == "wait":
            clock.now += value
        elif what == "heard":
            fleet.heard(name, incarnation)
        elif what == "lost":
            fleet.lost(name, incarnation)
        elif what == "restart":
            if fleet.health(name) is Health.DEAD:
                fleet.restarted(name)
        elif what == "look":
            fleet.look()
        elif what == "commit":
            fleet.commit(fleet.committed + 1)
        else:
            fleet.holds(name, incarnation, fleet.committed)
        members = fleet.members()
        for each in NAMES:
            old, new = before[each], members[each]
            changes += old.is_dead != new.is_dead
            assert new.incarnation - old.incarnation == (old.is_dead and not new.is_dead)
            if old.is_dead and not new.is_dead:
                assert fleet.health(each) is Health.STALE  # never straight to HEALTHY
            if fleet.health(each) is Health.HEALTHY:
                assert new.version == fleet.committed
        before = members
        assert fleet.membership_epoch == changes
        living = frozenset((each, members[each].incarnation) for each in fleet.living)
        assert sets.setdefault(fleet.membership_epoch, living) == living
