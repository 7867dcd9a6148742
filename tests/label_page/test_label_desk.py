"""Leases, answers, undo and restarts at the desk. People are ana and ben."""

import sqlite3
from dataclasses import replace

import numpy as np
import pytest
from desks import LEASE_S, NOON, ask, desk_of, ids, listed, open_store, reply, sampled

from vla_rlaif.label_page.queue import Pair


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path) as store:
        yield store


@pytest.fixture
def desk(store):
    desk = desk_of(store)
    desk.join("ana")
    desk.join("ben")
    return desk


def in_force(store):
    return [(r.labeller, r.first, r.second, r.p_first) for r in store.records()]


def test_an_answer_is_stored_as_it_was_shown(desk, store):
    pair = reply(desk, "ana", 1.0)
    (record,) = store.records()
    assert (record.first, record.second, record.p_first) == (pair.first, pair.second, 1.0)
    assert (record.labeller, record.instruction, record.segment) == ("human/ana", "reach the cube", (0, 4))
    assert (record.time, record.corrects, record.held_out) == (NOON, None, False)


def test_two_people_never_get_the_same_pair(desk, store):
    seen = []
    for number in range(20):
        name = "ana" if number % 2 else "ben"
        other = "ben" if number % 2 else "ana"
        if number < 19:  # there are two left
            assert ask(desk, name).key != ask(desk, other).key
        if number < 17:
            assert desk.upcoming(name, NOON) != desk.upcoming(other, NOON)
        seen.append(reply(desk, name).key)
    assert len(set(seen)) == 20
    assert desk.question("ana", NOON) is None and desk.question("ben", NOON) is None
    assert desk.progress().done == 20
    assert {r.labeller for r in store.records()} == {"human/ana", "human/ben"}


def test_asking_again_gives_the_same_pair_and_the_next_one_is_the_one_announced(desk):
    pair, following = ask(desk, "ana"), desk.upcoming("ana", NOON)
    assert ask(desk, "ana", NOON + 50) == pair and desk.upcoming("ana", NOON + 50) == following
    reply(desk, "ana")
    assert ask(desk, "ana") == following


def test_a_pair_that_is_left_goes_to_somebody_else_when_its_lease_runs_out(store):
    desk = desk_of(store, listed((0, 1)), wanted=1)
    desk.join("ana")
    desk.join("ben")
    pair = ask(desk, "ana")
    assert desk.question("ben", NOON + LEASE_S - 1) is None and desk.num_leased == 1
    desk.renew("ana", NOON + 60)
    assert desk.question("ben", NOON + LEASE_S + 1) is None
    assert ask(desk, "ben", NOON + 60 + LEASE_S) == pair
    # Ana comes back and answers all the same: both opinions count, the pair is done once.
    assert desk.answer("ana", pair.first, pair.second, 0.0, NOON + 200)
    assert desk.answer("ben", pair.first, pair.second, 1.0, NOON + 201)
    assert len(store.records()) == 2 and desk.progress().done == 1


def test_the_last_pair_is_not_kept_waiting_behind_somebody_elses(store):
    desk = desk_of(store, listed((0, 1), (2, 3)), wanted=2)
    desk.join("ana")
    desk.join("ben")
    first = ask(desk, "ana")
    kept = desk.upcoming("ana", NOON)
    assert kept is not None and ask(desk, "ben") == kept
    assert ask(desk, "ana") == first and desk.upcoming("ana", NOON) is None


def test_who_leaves_keeps_the_pair_on_screen_and_gives_the_next_one_back(store):
    desk = desk_of(store, listed((0, 1), (2, 3)), wanted=2)
    desk.join("ana")
    shown, following = ask(desk, "ana"), desk.upcoming("ana", NOON)
    desk.leave("ana")
    desk.join("ben")
    assert ask(desk, "ben") == following
    assert ask(desk, "ana", NOON + 10) == shown


def test_an_answer_that_comes_twice_counts_once(desk, store):
    pair = reply(desk, "ana", 1.0)
    assert not desk.answer("ana", pair.first, pair.second, 0.0, NOON)
    assert not desk.answer("ana", pair.second, pair.first, 0.0, NOON)
    assert [r.p_first for r in store.records()] == [1.0]


def test_undo_is_a_correcting_record_and_the_pair_is_asked_again(desk, store):
    reply(desk, "ana", 1.0)
    following = ask(desk, "ana")
    question = desk.undo("ana", NOON)
    assert question.is_reopened and question.previous == 1.0
    assert [(r.p_first, r.corrects) for r in store.records()] == [(None, 1)]
    assert desk.progress().done == 0 and desk.people["ana"].counts()["labels"] == 0
    assert reply(desk, "ana", 0.0) == question.pair
    assert [(r.p_first, r.corrects) for r in store.records()] == [(0.0, 2)]
    assert [r.p_first for r in store.records(history=True)] == [1.0, None, 0.0]
    assert ask(desk, "ana") == following and desk.progress().done == 1


def test_undo_goes_back_step_by_step_and_forward_again(desk, store):
    first, second, third = (reply(desk, "ana", p) for p in (1.0, 0.5, 0.0))
    assert [desk.undo("ana", NOON).pair for _ in range(3)] == [third, second, first]
    with pytest.raises(ValueError, match="no answer of yours to take back"):
        desk.undo("ana", NOON)
    assert [reply(desk, "ana", 0.0) for _ in range(3)] == [first, second, third]
    assert [(r.first, r.p_first) for r in store.records()] == [(p.first, 0.0) for p in (first, second, third)]


def test_undo_takes_back_ones_own_answer_only(desk):
    reply(desk, "ana")
    with pytest.raises(ValueError, match="no answer of yours"):
        desk.undo("ben", NOON)


def test_a_restart_goes_on_where_everybody_stopped(store, tmp_path):
    desk = desk_of(store, sampled(seed=0))
    desk.join("ana")
    given = [reply(desk, "ana", p) for p in (1.0, 0.5, None, 0.0)]
    desk.undo("ana", NOON)
    open_pair = ask(desk, "ana")
    store.close()
    with open_store(tmp_path) as again:
        taken = tuple(frozenset((r.first, r.second)) for r in again.records())
        desk = desk_of(again, sampled(taken=taken, seed=0))
        desk.join("ana")
        assert desk.progress().done == 3
        assert desk.people["ana"].counts() == {"labels": 3, "ties": 1, "skips": 1}
        question = desk.question("ana", NOON)
        assert question is not None and question.is_reopened and question.pair == open_pair == given[3]
        reply(desk, "ana", 1.0)
        assert ask(desk, "ana").key not in {pair.key for pair in given}
        assert desk.undo("ana", NOON).pair == given[3]
        assert desk.undo("ana", NOON).pair == given[2]


def test_a_pair_that_was_on_screen_over_a_restart_can_be_answered(store, tmp_path):
    desk = desk_of(store)
    desk.join("ana")
    pair = ask(desk, "ana")
    desk = desk_of(store, sampled(seed=5))
    desk.join("ana")
    assert desk.answer("ana", pair.first, pair.second, 1.0, NOON)
    assert in_force(store) == [("human/ana", pair.first, pair.second, 1.0)]


def test_repetitions_change_the_sides_and_count_apart(store):
    desk = desk_of(store, sampled(24), wanted=60, repeat=0.5, repeat_after=5)
    desk.join("ana")
    asked = [reply(desk, "ana", 1.0) for _ in range(60)]
    places: dict[frozenset[str], list[int]] = {}
    for place, pair in enumerate(asked):
        places.setdefault(pair.key, []).append(place)
    repeated = {key: found for key, found in places.items() if len(found) > 1}
    assert len(repeated) >= 10
    for first, second in repeated.values():  # at most once each
        assert asked[second] == asked[first].swapped and second - first > 5
    progress = desk.progress()
    assert (progress.done, progress.repeats) == (60 - len(repeated), len(repeated))


def test_somebody_elses_pairs_are_asked_again_too(store):
    desk = desk_of(store, sampled(24), wanted=60, repeat=0.5)
    desk.join("ana")
    desk.join("ben")
    for _ in range(10):
        reply(desk, "ana", 1.0)
    mine = {reply(desk, "ben", 1.0).key for _ in range(30)}
    common = [key for key in desk.repeated() if key in mine]
    assert len(common) >= 5
    hers = {key: turn.pair for key in common for name, turn in desk.opinions(key) if name == "ana"}
    his = {key: turn.pair for key in common for name, turn in reversed(desk.opinions(key)) if name == "ben"}
    assert len(hers) >= 3
    assert all(his[key] == pair.swapped for key, pair in hers.items())


def test_held_out_pairs_are_stored_as_such(store):
    held = [row < 8 for row in range(16)]
    desk = desk_of(store, sampled(held=np.array(held), held_out=0.5), wanted=40)
    desk.join("ana")
    for _ in range(40):
        reply(desk, "ana")
    sides = {name: row for row, name in enumerate(ids(16))}
    for record in store.records():
        assert (sides[record.first] < 8) == (sides[record.second] < 8) == record.held_out
    assert 8 <= sum(r.held_out for r in store.records()) <= 32


@pytest.mark.parametrize(
    ("first", "second"), [("0:0", "0:99"), ("9:9", "0:1"), ("0:0", "0:0"), ("", "0:1"), ("../../x", "0:1")]
)
def test_pairs_that_cannot_be_are_refused(desk, store, first, second):
    with pytest.raises(ValueError, match="not a pair to be labelled here"):
        desk.answer("ana", first, second, 1.0, NOON)
    assert not store.records()


def test_a_pair_across_the_split_is_refused(store):
    desk = desk_of(store, sampled(held=np.arange(16) < 8))
    desk.join("ana")
    with pytest.raises(ValueError, match="not a pair to be labelled here"):
        desk.answer("ana", "0:0", "0:12", 1.0, NOON)


@pytest.mark.parametrize("name", ["", " ana", "ana ", "a" * 41, "a/b", "<b>", "_", "an\na", "human/ana"])
def test_what_is_no_name_is_refused(desk, name):
    with pytest.raises(ValueError, match="is no name: use 1 to 40 letters"):
        desk.join(name)


@pytest.mark.parametrize("name", ["a", "Ana B.", "Åsa", "李雷", "labeller-2", "x_1"])
def test_names_of_people_are_taken(desk, store, name):
    desk.join(name)
    reply(desk, name)
    assert store.records()[-1].labeller == f"human/{name}"


def test_strangers_must_say_who_they_are(desk):
    with pytest.raises(ValueError, match="Say who you are"):
        desk.question("eve", NOON)


def test_a_locked_store_loses_no_question(desk, store, tmp_path):
    pair = ask(desk, "ana")
    other = sqlite3.connect(tmp_path / "labels.sqlite", autocommit=True)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ValueError, match="is locked"):
        desk.answer("ana", pair.first, pair.second, 1.0, NOON)
    assert desk.progress().done == 0 and ask(desk, "ana") == pair
    other.execute("ROLLBACK")
    other.close()
    assert desk.answer("ana", pair.first, pair.second, 1.0, NOON)
    assert desk.progress().done == 1 and len(store.records()) == 1
    # Undo fails whole, too.
    other = sqlite3.connect(tmp_path / "labels.sqlite", autocommit=True)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ValueError, match="is locked"):
        desk.undo("ana", NOON)
    other.close()
    assert desk.progress().done == 1 and not desk.people["ana"].reopened


def test_labels_of_machines_are_left_alone(store):
    desk = desk_of(store)
    desk.join("ana")
    reply(desk, "ana")
    store.append([replace(store.records()[0], id=None, labeller="oracle/1", first="0:1", second="0:2")])
    again = desk_of(store)
    assert set(again.people) == {"ana"} and again.progress().done == 1


@pytest.mark.parametrize("settings", [{"wanted": 0}, {"repeat": 1.0}, {"lease_s": 0.0}, {"repeat_after": 0}])
def test_impossible_settings_are_refused(store, settings):
    with pytest.raises(ValueError, match=r"must be|wanted"):
        desk_of(store, **settings)


def test_a_listed_pair_is_itself_when_swapped():
    pair = Pair(first="a", second="b", held_out=True)
    assert pair.swapped == Pair(first="b", second="a", held_out=True) and pair.swapped.key == pair.key
