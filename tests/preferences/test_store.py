"""The store keeps everything, and says clearly what is wrong with a file."""

import sqlite3
import timeit
import tracemalloc
import uuid
from dataclasses import replace

import numpy as np
import pytest
from damage import damage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vla_rlaif.preferences.store import Preference, PreferenceStore

RECORD = Preference(
    first="3:0",
    second="3:1",
    segment=(0, 16),
    instruction="reach the red cube",
    p_first=1.0,
    labeller="oracle/1",
    step=3,
    held_out=False,
    time=1.5,
    both_orders=(0.9, 0.2),
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "preferences.sqlite"


@pytest.fixture
def store(path):
    with PreferenceStore(path) as store:
        yield store


def steps(store, **arguments):
    return [record.step for record in store.records(**arguments)]


def test_records_come_back_as_they_went_in(store, path):
    tie, skip = replace(RECORD, p_first=0.5, both_orders=None, held_out=True), replace(RECORD, p_first=None)
    assert store.append([RECORD, tie, skip]) == (1, 2, 3)
    expected = tuple(replace(record, id=i + 1) for i, record in enumerate((RECORD, tie, skip)))
    with PreferenceStore(path) as again:
        assert again.records() == expected
        assert (again.count, again.last_id) == (3, 3)
    assert [(r.is_tie, r.is_skip) for r in expected] == [(False, False), (True, False), (False, True)]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE preference SET p_first = 0",
        "DELETE FROM preference",
        "INSERT OR REPLACE INTO preference SELECT * FROM preference",
        "DELETE FROM rewind",
    ],
)
def test_nobody_can_change_a_record(store, path, statement):
    store.append([RECORD, RECORD])
    store.rewind(1)
    other = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        other.execute(statement)
    other.close()
    assert len(store.records(history=True)) == 2


def test_a_batch_is_appended_whole_or_not_at_all(store):
    with pytest.raises(ValueError, match=r"A correction names record 9, but .* holds records 1 to 0"):
        store.append([RECORD, replace(RECORD, corrects=9)])
    bad = replace(RECORD)
    object.__setattr__(bad, "labeller", None)  # what the schema refuses
    with pytest.raises(sqlite3.IntegrityError):
        store.append([RECORD, bad])
    assert store.count == 0


def test_the_last_correction_wins_and_the_past_can_be_read(store):
    store.append([RECORD, replace(RECORD, step=4)])
    store.append([replace(RECORD, step=5, corrects=1)])
    store.append([replace(RECORD, step=6, corrects=1)])
    store.append([replace(RECORD, step=7, corrects=4)])
    assert steps(store) == [4, 7]
    assert steps(store, until_id=4) == [4, 6]
    assert steps(store, until_id=2) == [3, 4]
    assert steps(store, history=True) == [3, 4, 5, 6, 7]


def test_a_rewind_abandons_records_and_keeps_them(store):
    store.append([replace(RECORD, step=i) for i in range(1, 5)])  # ids 1 to 4
    store.rewind(2)  # id 5
    assert steps(store) == [1, 2]
    assert steps(store, until_id=4) == [1, 2, 3, 4]
    assert store.append([replace(RECORD, step=30), replace(RECORD, step=40)]) == (6, 7)
    assert steps(store) == [1, 2, 30, 40]
    store.rewind(3)  # id 8: to a checkpoint of the first branch, so 3 is in force again, and 6 and 7 are not
    store.append([replace(RECORD, step=50)])
    assert steps(store) == [1, 2, 3, 50]
    assert steps(store, until_id=7) == [1, 2, 30, 40]
    assert steps(store, until_id=4) == [1, 2, 3, 4]
    assert len(store.records(history=True)) == 7


def test_a_correction_lives_and_dies_with_its_record(store):
    store.append([RECORD, replace(RECORD, step=4)])
    store.append([replace(RECORD, step=5, corrects=1), replace(RECORD, step=6, corrects=2)])
    store.rewind(1)
    assert steps(store) == [5]


def test_a_rewind_beyond_the_end_is_refused(store):
    with pytest.raises(ValueError, match=r"after record 5, but .* ends at record 0"):
        store.rewind(5)


def test_a_corrupt_file_is_named(path):
    path.write_bytes(b"this is no database, only text that is long enough" * 100)
    with pytest.raises(ValueError, match="not a readable preference store"):
        PreferenceStore(path)


def test_a_damaged_page_is_named(store, path):
    store.append([RECORD] * 200)
    store.close()
    damage(path)
    with pytest.raises(ValueError, match="not a readable preference store"), PreferenceStore(path) as damaged:
        damaged.records()


def test_a_foreign_database_is_left_alone(path):
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE diary (day TEXT)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(ValueError, match="SQLite file of another program"):
        PreferenceStore(path)
    assert path.read_bytes() == before


def test_another_schema_version_is_named(store, path):
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(ValueError, match="has preference store schema 99, this version of vla_rlaif reads 1"):
        PreferenceStore(path)


def test_a_locked_file_is_named_and_readable(store, path):
    store.append([RECORD])
    other = sqlite3.connect(path, autocommit=True)
    other.execute("BEGIN IMMEDIATE")
    with PreferenceStore(path, timeout_s=0.05) as second:
        assert second.count == 1
        with pytest.raises(ValueError, match=r"is locked: another process has been writing it for 0.05 s"):
            second.append([RECORD])
    other.close()


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"folder .*nowhere does not exist"):
        PreferenceStore(tmp_path / "nowhere" / "preferences.sqlite")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"second": "3:0"}, "compares two episodes"),
        ({"p_first": 1.5}, "probability in"),
        ({"segment": (4, 4)}, "0 <= start < stop"),
    ],
)
def test_impossible_records_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(RECORD, **change)


def test_a_correction_of_a_corrected_record_takes_its_place(store):
    """As when two people correct the same label at once: one record stays in force, the last."""
    store.append([RECORD])
    store.append([replace(RECORD, step=4, corrects=1)])
    store.append([replace(RECORD, step=5, corrects=1)])
    store.append([replace(RECORD, step=6, corrects=2)])
    assert steps(store) == [6] and store.count == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["add", "correct", "rewind"]), st.integers(0, 99)), max_size=12))
def test_counts_and_samples_are_of_the_records_in_force(tmp_path, actions):
    path = tmp_path / f"{uuid.uuid4()}.sqlite"
    with PreferenceStore(path) as store, PreferenceStore(path) as reader:
        for number, (action, choice) in enumerate(actions):
            records = store.records(history=True)
            if action == "rewind":
                store.rewind(choice % (store.last_id + 1))
            elif action == "add" or not records:
                store.append([replace(RECORD, step=number)] * (1 + choice % 3))
            else:
                store.append([replace(RECORD, step=number, corrects=records[choice % len(records)].id)])
            in_force = store.records()
            assert reader.count == len(in_force) == len({r.id for r in in_force})
            everything = reader.sample(len(in_force) + 1, seed=choice)
            assert sorted(r.id or 0 for r in everything) == [r.id for r in in_force]
            few = reader.sample(len(in_force) // 3, seed=choice)
            assert len(few) == len(in_force) // 3 and set(few) <= set(in_force)
        for until in range(store.last_id + 1):
            assert all((r.id or 0) <= until for r in store.records(until_id=until))


def test_samples_are_uniform(store):
    store.append([replace(RECORD, step=i) for i in range(12)])
    store.append([replace(RECORD, step=100 + i, corrects=i) for i in (1, 2)])
    store.rewind(10)  # 10 in force, two of them by a correction
    drawn = np.array([record.step for seed in range(1000) for record in store.sample(2, seed)])
    found, num = np.unique(drawn, return_counts=True)
    assert found.tolist() == [*range(2, 10), 101, 102]
    assert np.abs(num - 200).max() < 4 * np.sqrt(2000 * 0.1 * 0.9)  # four standard errors


def test_a_hundred_thousand_records(path):
    """Sampling and appending take as long as in a small store, and no memory for the rest; figures: docs/labels.md."""
    with PreferenceStore(path) as store:
        for _ in range(10):
            store.append([RECORD] * 10_000)
        store.append([replace(RECORD, corrects=i) for i in range(1, 100_000, 100)])
        store.sample(1, 0)  # reads the corrections once
        assert store.count == 100_000
        tracemalloc.start()
        sampling = min(timeit.repeat(lambda: store.sample(1, 7), number=1, repeat=20))
        appending = min(timeit.repeat(lambda: store.append([RECORD]), number=1, repeat=20))
        counting = min(timeit.repeat(lambda: store.count, number=1, repeat=20))
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert max(sampling, appending, counting) < 5e-3
    assert memory < 2**20
