"""What the page is told of one thing, as JSON: a run, an episode, a group, the labels, the record of a pool.

Axes as in source.py.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vla_rlaif.inspect.answers import episode_rows, plain, run_summary
from vla_rlaif.inspect.run import Run
from vla_rlaif.inspect.source import Source, say_ids
from vla_rlaif.local_page.sheets import columns_of
from vla_rlaif.preferences.agreement import measure_agreement
from vla_rlaif.preferences.store import Preference

MAX_PAIRS = 200  # in one answer
MAX_POINTS = 400  # of a pool's history


def describe_source(source: Source) -> dict[str, Any]:
    """Of a run with its settings; of a dataset only what it is."""
    about: dict[str, Any] = {"path": str(source.path), "now": time.time(), "episodes": len(source.table.id)}
    about |= {"stamp": stamp(source)["stamp"]}  # of before what is told: news in between are told twice, not never
    if not isinstance(source, Run):
        return about | {"kind": "dataset", "problems": []}
    config = source.config
    return (
        about
        | run_summary(source)
        | {
            "kind": "run",
            "config": None if config is None else yaml.safe_dump(dict(config), sort_keys=False),
            "versions": (source.result or source.manifest or {}).get("versions"),
            "git": _code((source.manifest or {}).get("git")),
            "best_step": (source.result or {}).get("best_step"),
            "group_size": source.setting("algorithm", "group_size"),
            "record_every": source.setting("record", "every"),
            "has_card": source.card is not None,
            "problems": source.problems,
        }
    )


def _code(git: Any) -> dict[str, Any] | None:
    """The commit that a run's code came from and whether it had changes; None if it was not run from a checkout. A
    manifest without a format has the commit alone."""
    found = {"commit": git, "dirty": None} if isinstance(git, str) else dict(git or {})
    return {name: found.get(name) for name in ("commit", "dirty")} if found.get("commit") else None


def stamp(source: Source) -> dict[str, Any]:
    """Changes when there is something new; asked for every few seconds."""
    if not isinstance(source, Run):
        return {"stamp": f"{len(source.table.id)}"}
    store = source.path / "preferences.sqlite-wal"
    labels = store.stat().st_mtime_ns if store.exists() else 0
    lines = source.metrics.num
    return {
        "stamp": f"{source.metrics.epoch}.{lines}.{len(source.table.id)}.{labels}.{source.result is not None}",
        "lines": lines,
        "epoch": source.metrics.epoch,
        "finished": source.result is not None,
        "written": source.metrics.written,
        "now": time.time(),
    }


def describe_metrics(run: Run, epoch: int, first: int) -> dict[str, Any]:
    part = run.metrics.part(epoch, first)
    columns = {name: plain(values) for name, values in part.columns.items()}
    return {"epoch": part.epoch, "first": part.first, "num": part.num, "columns": columns}


def describe_episode(source: Source, name: str) -> dict[str, Any]:
    """Everything but the frames, which are a picture for each camera."""
    table = source.table
    if name not in table.id:
        raise ValueError(f"{source.path} has no episode {name!r}; it has {say_ids(table)}.")
    row, numbers = table.id.index(name), source.numbers(name)
    num_frames = max(len(numbers.state), len(numbers.action))
    return {
        **episode_rows(table, np.array([row]))[0],
        "frames": num_frames,
        "columns": columns_of(num_frames),
        "cameras": {camera: list(size) for camera, size in source.sizes(name).items()},
        "state": plain(numbers.state),
        "action": plain(numbers.action),
        "logp": plain(numbers.logp),
        "executed": plain(numbers.executed),
        "progress": None if numbers.progress is None else plain(numbers.progress),
    }


def describe_group(source: Source, name: str) -> dict[str, Any]:
    """All members of an episode's group, by member, and the groups beside it."""
    table = source.table
    if name not in table.id:
        raise ValueError(f"{source.path} has no episode {name!r}; it has {say_ids(table)}.")
    group = int(table.group_of[table.id.index(name)])
    rows = np.flatnonzero(table.group_of == group)
    rows = rows[np.argsort(table.member[rows], kind="stable")]
    beside = {
        word: table.id[int(np.flatnonzero(table.group_of == other)[0])]
        for word, other in (("before", group - 1), ("next", group + 1))
        if 0 <= other <= int(table.group_of.max())
    }
    return {"members": [describe_episode(source, table.id[row]) for row in rows.tolist()], **beside}


def describe_some(source: Source, names: list[str]) -> dict[str, Any]:
    """Episodes that a reader has chosen to compare."""
    return {"members": [describe_episode(source, name) for name in names]}


def describe_preferences(run: Run, offset: int, only: str) -> dict[str, Any]:
    """Newest first. ``only``: all, kept (both episodes can be played), held_out, ties, skips."""
    records = run.preferences()
    table = run.table
    reward = dict(zip(table.id, table.reward.tolist(), strict=True))
    keep = {
        "all": lambda r: True,
        "kept": lambda r: r.first in reward and r.second in reward,
        "held_out": lambda r: r.held_out,
        "ties": lambda r: r.is_tie,
        "skips": lambda r: r.is_skip,
    }
    if only not in keep:
        raise ValueError(f"there are no pairs {only!r}; there are {', '.join(keep)}.")
    chosen = [record for record in reversed(records) if keep[only](record)]
    found = measure_agreement(records)
    return {
        "total": len(chosen),
        "all": len(records),
        "kept": sum(keep["kept"](record) for record in records),
        "labellers": [_finite(asdict(one)) for one in found.labellers],
        "agreement": [_finite(asdict(two)) for two in found.pairs],
        "alpha": plain([found.alpha])[0],
        "by_step": sorted(Counter(record.step for record in records).items()),
        "pairs": [_pair(record, reward) for record in chosen[offset : offset + MAX_PAIRS]],
    }


def _pair(record: Preference, reward: Mapping[str, float]) -> dict[str, Any]:
    return {
        "id": record.id,
        "first": record.first,
        "second": record.second,
        "instruction": record.instruction,
        "p_first": record.p_first,
        "both_orders": record.both_orders,
        "labeller": record.labeller,
        "step": record.step,
        "held_out": record.held_out,
        "corrects": record.corrects,
        "has": [record.first in reward, record.second in reward],
        "rewards": plain([reward.get(record.first, np.nan), reward.get(record.second, np.nan)]),
    }


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(values, plain([list(v) if isinstance(v, tuple) else v for v in values.values()]), strict=True))


def describe_pool(folder: Path) -> dict[str, Any]:
    """GPU-seconds by role and state, and who had what when (pool/archive.py)."""
    sums = json.loads((folder / "record.json").read_text())
    spent: Counter[tuple[str, str]] = Counter()
    for role, _window, state, micros in sums["spent"]:
        spent[role, state] += micros
    series = []
    for line in (folder / "record.jsonl").read_text(encoding="ascii").splitlines():
        if line.endswith("}}") and line.startswith('{"counts"'):  # else its writer was killed in the middle of it
            fields = json.loads(line)["counts"]
            roles: Counter[str] = Counter()
            for role, state, num in fields["gpus"]:
                roles[role if state not in ("idle", "dead", "unseen") else state] += num
            series.append({"at": fields["at"] / 1e6, "roles": dict(roles)})
    step = -(-len(series) // MAX_POINTS) or 1
    return {
        "start": sums["start"] / 1e6,
        "now": sums["now"] / 1e6,
        "gpus": sums["num_gpus"],
        "spent": [[role, state, micros / 3.6e9] for (role, state), micros in sorted(spent.items())],
        "series": series[::step],
    }
