"""What the page is told, as JSON: lists of runs, episodes and groups. ``details.py`` has single ones.

NaN, which JSON lacks, becomes null. Axes: N episodes, M of them, G groups.
"""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from vla_rlaif.inspect.filters import Filter, ordered
from vla_rlaif.inspect.library import Entry, Library
from vla_rlaif.inspect.run import Run
from vla_rlaif.inspect.source import Source
from vla_rlaif.inspect.table import EpisodeTable

MAX_ROWS = 200  # of a list, in one answer
SPARK = 60  # points of a small curve in the list of runs


def plain(values: np.ndarray | Iterable[Any]) -> list[Any]:
    """Numbers with seven digits, None for those that JSON lacks."""
    return [_plain(value) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def list_entries(library: Library) -> dict[str, Any]:
    entries = []
    for entry in library.entries():
        try:
            entries.append(_summary(library, entry))
        except (ValueError, OSError) as error:  # a damaged one must not hide the others
            entries.append({"name": entry.name, "title": _title(entry), "kind": entry.kind, "problem": str(error)})
    return {"root": str(library.root), "now": time.time(), "entries": entries}


def _title(entry: Entry) -> str:
    return entry.path.resolve().name if entry.name == "." else entry.name


def _summary(library: Library, entry: Entry) -> dict[str, Any]:
    about: dict[str, Any] = {"name": entry.name, "title": _title(entry), "kind": entry.kind}
    if entry.kind == "pool":
        return about
    source = library.source(entry.name)
    table = source.table
    about["episodes"] = len(table.id)
    if isinstance(source, Run):
        return about | run_summary(source)
    known = table.success[np.isfinite(table.success)]
    tasks = sorted(set(table.instruction))
    return about | {"success": _plain(float(known.mean())) if len(known) else None, "task": _some(tasks)}


def run_summary(run: Run) -> dict[str, Any]:
    result, metrics = run.result or {}, run.metrics
    curve = metrics.part().columns.get("rollout/success", [])
    known = [value for value in curve if value is not None]
    places = np.linspace(0, len(known) - 1, min(SPARK, len(known))).round().astype(int).tolist() if known else []
    part = metrics.part().columns.get("step", [])
    return {
        "task": result.get("task") or run.setting("env", "task") or run.setting("env", "type"),
        "policy": run.setting("policy", "type"),
        "reward": run.setting("reward", "type"),
        "seed": run.setting("seed"),
        "steps": int(part[-1] or 0) + 1 if part else 0,
        "planned": run.setting("loop", "steps"),
        "finished": run.result is not None,
        "written": metrics.written,
        "minutes": _plain(result.get("minutes", metrics.last("minutes"))),
        "before": _rate(result, "before"),
        "after": _rate(result, "after"),
        "success": known[-1] if known else None,
        "labels": result.get("labels", metrics.last("labels/total")),
        "spark": plain(known[place] for place in places),
        "problems": run.problems,
    }


def _rate(result: Mapping[str, Any], when: str) -> list[float] | None:
    """Rate, low, high."""
    rate, interval = result.get(f"success_{when}"), result.get(f"ci95_{when}")
    return None if rate is None or interval is None else [rate, *interval]


def _some(tasks: list[str]) -> str:
    return tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks" if tasks else ""


def list_episodes(source: Source, query: str, order: str, offset: int, limit: int) -> dict[str, Any]:
    """A page of the episodes that pass the filter."""
    table = source.table
    rows = ordered(table, Filter.parse(query).rows(table), order)
    shown = rows[max(offset, 0) : max(offset, 0) + min(limit, MAX_ROWS)]
    return {
        "total": len(rows),
        "all": len(table.id),
        "offset": max(offset, 0),
        "facets": _facets(table),
        "episodes": episode_rows(table, shown),
    }


def episode_rows(table: EpisodeTable, rows: Int[np.ndarray, " M"]) -> list[dict[str, Any]]:
    names = ("step", "group", "member", "version", "reward", "advantage", "success", "truth", "valid")
    columns = {name: plain(vars(table)[name][rows]) for name in names}
    columns |= {"decisions": plain(table.decisions[rows]), "spread": plain(table.spread[rows])}
    columns |= {"disagreement": plain(table.disagreement[rows])}
    columns |= {"seed": [str(seed) for seed in table.seed[rows].tolist()]}  # too large for a number of JavaScript
    for name, texts in (("id", table.id), ("origin", table.origin), ("instruction", table.instruction)):
        columns[name] = [texts[row] for row in rows.tolist()]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def list_groups(source: Source, query: str, order: str, offset: int, limit: int) -> dict[str, Any]:
    """A page of the groups that have an episode which passes the filter."""
    table = source.table
    passing = Filter.parse(query).rows(table)
    groups = _groups(table, np.unique(table.group_of[passing]))
    key = order.removeprefix("-")
    if key not in GROUP_ORDERS:
        raise ValueError(f"order {order!r} is unknown; groups are ordered by {', '.join(GROUP_ORDERS)}.")
    sign = -1.0 if order.startswith("-") else 1.0
    groups.sort(key=lambda group: math.inf if group[key] is None else sign * group[key])
    first = max(offset, 0)
    return {
        "total": len(groups),
        "all": int(table.group_of.max(initial=-1)) + 1,
        "offset": first,
        "facets": _facets(table),
        "groups": groups[first : first + min(limit, MAX_ROWS)],
    }


GROUP_ORDERS = ("step", "success", "reward", "spread", "disagreement")


def _groups(table: EpisodeTable, wanted: Int[np.ndarray, " G"]) -> list[dict[str, Any]]:
    """All in one pass over the episodes."""
    number = int(table.group_of.max(initial=-1)) + 1
    size = np.bincount(table.group_of, minlength=number)
    first = np.full(number, len(table.id))
    np.minimum.at(first, table.group_of, np.arange(len(table.id)))
    live = np.bincount(table.group_of, np.nan_to_num(table.advantage) != 0, number) > 0
    mean = {name: _mean(vars(table)[name], table.group_of, number) for name in ("success", "reward", "truth")}
    disagreement = _mean(table.disagreement, table.group_of, number)
    rows = first[wanted]
    columns = {
        "step": plain(table.step[rows]),
        "group": plain(table.group[rows]),
        "seed": [str(seed) for seed in table.seed[rows].tolist()],
        "version": plain(table.version[rows]),
        "size": plain(size[wanted]),
        "live": plain(live[wanted]),
        "spread": plain(table.spread[rows]),
        "disagreement": plain(disagreement[wanted]),
        **{name: plain(values[wanted]) for name, values in mean.items()},
        "id": [table.id[row] for row in rows.tolist()],  # of a member: it stands for the group
        "origin": [table.origin[row] for row in rows.tolist()],
        "instruction": [table.instruction[row] for row in rows.tolist()],
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _mean(values: np.ndarray, group: np.ndarray, number: int) -> np.ndarray:
    """Of what is known."""
    known = np.isfinite(values)
    count = np.bincount(group, known, number)
    total = np.bincount(group, np.where(known, values, 0.0), number)
    return np.divide(total, count, out=np.full(number, np.nan), where=count > 0)


def _facets(table: EpisodeTable) -> dict[str, Any]:
    """What can be chosen from."""
    tasks, counts = np.unique(np.array(table.instruction, dtype=np.str_), return_counts=True)
    known = np.isfinite(table.reward)
    return {
        "tasks": [{"task": str(task), "num": int(num)} for task, num in zip(tasks[:50], counts[:50], strict=True)],
        "origins": sorted(set(table.origin)),
        "steps": [int(table.step.min()), int(table.step.max())] if len(table.id) else None,
        "rewards": plain([table.reward[known].min(), table.reward[known].max()]) if known.any() else None,
    }
