"""Outcomes are only added, the newest counts, and what is wrong with a file is said."""

import sqlite3
from dataclasses import replace

import pytest
from damage import damage

from vla_rlaif.preferences.outcome_store import Outcome, OutcomeStore, outcome_path
from vla_rlaif.preferences.store import PreferenceStore

ONE = Outcome(episode="3:0", instruction="push", p_success=1.0, labeller="oracle/1", step=3, time=5.0)


@pytest.fixture
def path(tmp_path):
    return outcome_path(tmp_path / "labels.sqlite")


@pytest.fixture
def store(path):
    with OutcomeStore(path) as store:
        yield store


def test_what_was_said_comes_back(store, path):
    assert path.name == "labels.outcomes.sqlite"
    unsure = replace(ONE, episode="3:1", p_success=None)
    store.append([ONE, unsure])
    with OutcomeStore(path) as again:
        assert again.newest() == {"3:0": ONE, "3:1": unsure}


def test_of_several_answers_the_newest_counts_and_all_are_kept(store, path):
    store.append([ONE])
    store.append([replace(ONE, p_success=0.2, time=1.0), replace(ONE, episode="3:1")])  # a clock that went back
    assert store.newest()["3:0"].p_success == 0.2
    assert len(store.newest()) == 2
    other = sqlite3.connect(path)
    assert other.execute("SELECT p_success FROM outcome WHERE episode = '3:0' ORDER BY id").fetchall() == [(1,), (0.2,)]
    other.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE outcome SET p_success = 0",
        "DELETE FROM outcome",
        "INSERT OR REPLACE INTO outcome VALUES (1, '3:0', 'push', 0, 'me', 0, 0)",
    ],
)
def test_nobody_changes_what_was_said(store, path, statement):
    store.append([ONE])
    other = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        other.execute(statement)
    other.close()
    assert store.newest() == {"3:0": ONE}


def test_a_batch_is_appended_whole_or_not_at_all(store):
    bad = replace(ONE, episode="3:1")
    object.__setattr__(bad, "labeller", None)  # what the schema refuses
    with pytest.raises(sqlite3.IntegrityError):
        store.append([ONE, bad])
    assert store.newest() == {}


def test_a_locked_file_is_named_and_readable(store, path):
    store.append([ONE])
    other = sqlite3.connect(path, autocommit=True)
    other.execute("BEGIN IMMEDIATE")
    with OutcomeStore(path, timeout_s=0.05) as second:
        assert second.newest() == {"3:0": ONE}
        with pytest.raises(ValueError, match=r"outcomes.sqlite is locked: another process has been writing it"):
            second.append([ONE])
    other.close()


def test_a_corrupt_file_is_named(store, path):
    store.append([replace(ONE, episode=f"3:{n}") for n in range(200)])
    store.close()
    damage(path)
    with pytest.raises(ValueError, match="not a readable outcome store"), OutcomeStore(path) as damaged:
        damaged.newest()
    path.write_bytes(b"this is no database, only text that is long enough" * 100)
    with pytest.raises(ValueError, match=r"not a readable outcome store .*: restore it from a copy"):
        OutcomeStore(path)


def test_a_preference_store_is_no_outcome_store(path):
    with PreferenceStore(path):
        pass
    with pytest.raises(ValueError, match="another program: give the outcome store another path"):
        OutcomeStore(path)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_impossible_outcomes_are_refused(p):
    with pytest.raises(ValueError, match="p_success is a probability"):
        replace(ONE, p_success=p)
