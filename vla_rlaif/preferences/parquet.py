"""Preference records as a Parquet file, for other programs, and back.

A file has every record ever appended, a column a field, and which of them are in force. Taking a file in appends what
is in force in it as new records, but for those that the store has already.
"""

import dataclasses
from pathlib import Path

from vla_rlaif.checkpoint import write_whole
from vla_rlaif.preferences.store import Preference, PreferenceStore

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ModuleNotFoundError:
    raise ValueError("Parquet files need pyarrow: pip install pyarrow (the extra lerobot brings it).") from None

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("first", pa.string(), nullable=False),
        pa.field("second", pa.string(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
        pa.field("instruction", pa.string(), nullable=False),
        pa.field("p_first", pa.float64()),  # null: skipped or unscorable
        pa.field("labeller", pa.string(), nullable=False),
        pa.field("answer_first_second", pa.float64()),
        pa.field("answer_second_first", pa.float64()),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("held_out", pa.bool_(), nullable=False),
        pa.field("time", pa.float64(), nullable=False),  # seconds since 1970
        pa.field("corrects", pa.int64()),
        pa.field("in_force", pa.bool_(), nullable=False),
    ],
    metadata={"format": "vla_rlaif preferences 1"},
)


def export_parquet(store: PreferenceStore, path: Path) -> int:
    """Write the file, whole or not at all; returns the number of records."""
    in_force = {record.id for record in store.records()}
    rows = []
    for record in store.records(history=True):
        both = record.both_orders or (None, None)
        values = vars(record) | {"start": record.segment[0], "stop": record.segment[1]}
        values |= {"answer_first_second": both[0], "answer_second_first": both[1], "in_force": record.id in in_force}
        rows.append({name: values[name] for name in SCHEMA.names})
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), sink, compression="zstd")
    write_whole(path, sink.getvalue().to_pybytes())
    return len(rows)


def import_parquet(path: Path, store: PreferenceStore) -> tuple[int, int]:
    """Append the records in force in the file; returns how many were new, and how many the store had already.

    A corrected record comes in as what it was corrected to.

    Raises:
        ValueError: the file is none of ours, or damaged.
    """
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from None
    missing = [name for name in SCHEMA.names if name not in table.column_names]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]!r}: it was not written by `vla-rlaif labels export`.")
    known = {_content(record) for record in store.records()}
    fresh: dict[Preference, None] = {}
    num = 0
    for row in table.select(SCHEMA.names).to_pylist():
        if row["in_force"]:
            num += 1
            record = _record(row)
            if record not in known:
                fresh[record] = None
    store.append(list(fresh))
    return len(fresh), num - len(fresh)


def _content(record: Preference) -> Preference:
    """All but its place in one file."""
    return dataclasses.replace(record, id=None, corrects=None)


def _record(row: dict) -> Preference:
    both = row["answer_first_second"], row["answer_second_first"]
    return Preference(
        first=row["first"],
        second=row["second"],
        segment=(row["start"], row["stop"]),
        instruction=row["instruction"],
        p_first=row["p_first"],
        labeller=row["labeller"],
        step=row["step"],
        held_out=row["held_out"],
        time=row["time"],
        both_orders=None if None in both else both,
    )
