"""Which pair comes next: drawn one at a time from folders of any size, never the same pair twice.

Axes: N episodes.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from vla_rlaif.types import Episodes

_TRIES = 200  # before the pairs are counted out instead of drawn; reached when nearly all are taken


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two episodes as they are shown: ``first`` is on the left."""

    first: str
    second: str
    held_out: bool = False

    @property
    def key(self) -> frozenset[str]:
        """The same whichever is on the left."""
        return frozenset((self.first, self.second))

    @property
    def swapped(self) -> "Pair":
        return Pair(first=self.second, second=self.first, held_out=self.held_out)


@runtime_checkable
class PairQueue(Protocol):
    """Pairs that nobody has labelled yet. A pair that was drawn is never drawn again."""

    def draw(self) -> Pair | None:
        """None: there is none left."""
        ...

    def admit(self, first: str, second: str) -> Pair | None:
        """The pair as it would be drawn, if these two episodes may be compared. It counts as drawn."""
        ...


class SampledQueue:
    """Pairs of a folder: a share within a group (the same start state), the rest from anywhere.

    ``held`` tells the episodes that are never trained on; no pair joins one of them with another. Where what is wanted
    is used up the draw falls back, first to pairs across groups, then to the other side of the split.
    """

    def __init__(
        self,
        episodes: Episodes,
        ids: list[str],
        *,
        held: Bool[np.ndarray, " N"],
        taken: Iterable[frozenset[str]],
        within_group: float,
        held_out: float,
        seed: int,
    ) -> None:
        self._ids = ids
        self._row = {name: row for row, name in enumerate(ids)}
        self._held, self._valid = held, episodes.valid
        self._taken = set(taken)
        self._within_group, self._held_out = within_group, held_out
        self._rng = np.random.default_rng(seed)
        self._sides = {side: np.flatnonzero(episodes.valid & (held == side)) for side in (False, True)}
        self._groups = {side: _members(episodes.starts.group, rows) for side, rows in self._sides.items()}
        self._group = episodes.starts.group

    def draw(self) -> Pair | None:
        side = bool(self._rng.random() < self._held_out)
        in_group = bool(self._rng.random() < self._within_group)
        for is_held, is_in_group in ((side, in_group), (side, False), (not side, in_group), (not side, False)):
            rows = self._draw(is_held, is_in_group)
            if rows is not None:
                first, second = self._rng.permutation(rows)  # who is on the left is chance
                return self._take(self._ids[first], self._ids[second], is_held)
        return None

    def admit(self, first: str, second: str) -> Pair | None:
        if first == second or first not in self._row or second not in self._row:
            return None
        a, b = self._row[first], self._row[second]
        if not (self._valid[a] and self._valid[b]) or self._held[a] != self._held[b]:
            return None
        return self._take(first, second, bool(self._held[a]))

    def _take(self, first: str, second: str, is_held: bool) -> Pair:
        pair = Pair(first=first, second=second, held_out=is_held)
        self._taken.add(pair.key)
        return pair

    def _draw(self, is_held: bool, in_group: bool) -> tuple[int, int] | None:
        """Every row is as likely as any other; within a group, so is every partner."""
        rows = self._sides[is_held]
        if len(rows) < 2:
            return None
        for _ in range(_TRIES):
            first = int(self._rng.choice(rows))
            partners = self._groups[is_held][int(self._group[first])] if in_group else rows
            second = int(self._rng.choice(partners))
            if first != second and self._is_free(first, second):
                return first, second
        pools = self._groups[is_held].values() if in_group else [rows]
        free = [pair for pair in _pairs(pools) if self._is_free(*pair)]
        return free[int(self._rng.integers(len(free)))] if free else None

    def _is_free(self, first: int, second: int) -> bool:
        return frozenset((self._ids[first], self._ids[second])) not in self._taken


class ListedQueue:
    """The pairs that a step of training asks for, in its order; each of them once."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._pairs = {pair.key: pair for pair in pairs}
        self._left = list(self._pairs)[::-1]

    def draw(self) -> Pair | None:
        return self._pairs[self._left.pop()] if self._left else None

    def admit(self, first: str, second: str) -> Pair | None:
        key = frozenset((first, second))
        if key not in self._pairs:
            return None
        if key in self._left:
            self._left.remove(key)
        return Pair(first=first, second=second, held_out=self._pairs[key].held_out)


def _members(group: Int[np.ndarray, " N"], rows: Int[np.ndarray, " R"]) -> dict[int, Int[np.ndarray, " _"]]:
    """Rows by group."""
    order = rows[np.argsort(group[rows], kind="stable")]
    names, begins = np.unique(group[order], return_index=True)
    return dict(zip(names.tolist(), np.split(order, begins[1:]), strict=True)) if len(rows) else {}


def _pairs(pools: Iterable[Int[np.ndarray, " _"]]) -> Iterator[tuple[int, int]]:
    for pool in pools:
        yield from itertools.combinations(pool.tolist(), 2)
