"""Which records of an append-only store are in force. Knows ids only, no file.

Records and rewinds share one count of ids, without gaps. A rewind abandons the records since the one that it names; a
correction takes the place of the record at the end of the chain that it corrects, and lives and dies with it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int


@dataclass
class InForce:
    """Kept up to date with ``add``, so that nothing but the corrections is ever read again."""

    last: int = 0  # id up to which everything was added
    rewinds: dict[int, int] = field(default_factory=dict)  # id: the record to go on from
    root: dict[int, int] = field(default_factory=dict)  # id of a correction: the first record of its chain, ascending

    def add(self, last: int, rewinds: Iterable[tuple[int, int]], corrections: Iterable[tuple[int, int]]) -> None:
        """What came up to ``last``: (id, after) of rewinds and (id, corrected) of corrections, ascending."""
        self.rewinds.update(rewinds)
        for number, corrected in corrections:
            self.root[number] = self.root.get(corrected, corrected)
        self.last = last

    def lived(self, until: int) -> list[tuple[int, int]]:
        """Ranges (after, last] of ids in force, oldest first. A rewind that a later one went back behind never
        happened."""
        ranges, end = [], until
        for number in sorted(self.rewinds, reverse=True):
            if number <= end:
                ranges.append((number, end))
                end = self.rewinds[number]
        return [*ranges, (0, end)][::-1]

    def corrected(self, until: int) -> dict[int, int]:
        """The id that stands for a record, where that is not its own."""
        return {root: number for number, root in self.root.items() if number <= until}  # the last one wins

    def count(self, until: int) -> int:
        """Records in force: one for each that is no correction and was not abandoned."""
        other = sorted([*self.rewinds, *self.root])
        return sum(end - after - _between(other, after, end) for after, end in self.lived(until))

    def draw(self, num: int, rng: np.random.Generator) -> Int[np.ndarray, " n"]:
        """Ids of ``num`` different records in force, or of all if there are fewer, each equally likely."""
        ranges = self.lived(self.last)
        sizes = np.array([end - after for after, end in ranges])
        if num > self.count(self.last) // 2:
            everything = np.concatenate([np.arange(after + 1, end + 1) for after, end in ranges])
            usable = everything[~np.isin(everything, np.array([*self.rewinds, *self.root], np.int64))]
            chosen = rng.permutation(usable)[:num].tolist()
        else:
            found: dict[int, None] = {}
            while len(found) < num:  # each draw is new and usable in every other case or so
                which = int(rng.choice(len(ranges), p=sizes / sizes.sum()))
                number = int(rng.integers(ranges[which][0] + 1, ranges[which][1] + 1))
                if number not in self.rewinds and number not in self.root:
                    found[number] = None
            chosen = list(found)
        stands_for = self.corrected(self.last)
        return np.array([stands_for.get(number, number) for number in chosen], np.int64)


def _between(ascending: list[int], after: int, end: int) -> int:
    """How many are in (after, end]."""
    return bisect_right(ascending, end) - bisect_left(ascending, after + 1)
