"""Which episodes: one line of words such as ``task:push success:no reward:0.5.. step:10..50``.

The command line, the page and a notebook say it in the same words; all words must hold.

Axes: N episodes, M of them.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from vla_rlaif.inspect.table import EpisodeTable

Column = Literal[
    "reward", "advantage", "truth", "disagreement", "spread", "step", "group", "seed", "version", "decisions"
]
COLUMNS: tuple[Column, ...] = (
    "reward",
    "advantage",
    "truth",
    "disagreement",
    "spread",
    "step",
    "group",
    "seed",
    "version",
    "decisions",
)
WORDS = ("task", "id", "origin", "success", "valid", *COLUMNS)
ORDERS = ("step", "reward", "advantage", "truth", "success", "disagreement", "spread", "decisions")
USAGE = (
    "words are task:TEXT, id:ID, origin:train, success:yes|no, valid:yes|no and, with a number or a range such as "
    f"0.5..1, ..1 or 0.5..: {', '.join(COLUMNS)}"
)


@dataclass(frozen=True, kw_only=True)
class Range:
    column: Column
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Filter:
    """All of these hold. NaN is in no range."""

    tasks: tuple[str, ...] = ()  # each a part of the instruction; capitals do not matter
    ids: tuple[str, ...] = ()  # any of them
    origins: tuple[str, ...] = ()  # any of them
    success: bool | None = None
    valid: bool | None = None
    ranges: tuple[Range, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Filter":
        """Raises ValueError with the words that there are. A task of several words is written ``task:"green disc"``."""
        found: dict[str, list[str]] = {}
        for word in _words(text):
            name, colon, value = word.partition(":")
            if not colon or not value:
                raise ValueError(f"filter {word!r} is no NAME:VALUE; {USAGE}.")
            if name not in WORDS:
                near = difflib.get_close_matches(name, WORDS, n=1)
                raise ValueError(f"filter {name!r} is unknown{f'; did you mean {near[0]}?' if near else ''}; {USAGE}.")
            found.setdefault(name, []).append(value)
        return cls(
            tasks=tuple(found.get("task", ())),
            ids=tuple(found.get("id", ())),
            origins=tuple(found.get("origin", ())),
            success=_yes(found, "success"),
            valid=_yes(found, "valid"),
            ranges=tuple(_range(column, value) for column in COLUMNS for value in found.get(column, ())),
        )

    def mask(self, table: EpisodeTable) -> Bool[np.ndarray, " N"]:
        keep = np.ones(len(table.id), bool)
        for task in self.tasks:
            keep &= np.array([task.lower() in text.lower() for text in table.instruction], bool)
        for names, column in ((self.ids, table.id), (self.origins, table.origin)):
            if names:
                keep &= np.array([value in names for value in column], bool)
        if self.success is not None:
            keep &= table.success == float(self.success)
        if self.valid is not None:
            keep &= table.valid == self.valid
        for wanted in self.ranges:
            values = column_of(table, wanted.column)
            keep &= (values >= wanted.low) & (values <= wanted.high)
        return keep

    def rows(self, table: EpisodeTable) -> Int[np.ndarray, " M"]:
        """In the table's order."""
        return np.flatnonzero(self.mask(table))


def column_of(table: EpisodeTable, name: str) -> np.ndarray:
    """A numeric column, derived ones too."""
    return {
        "reward": table.reward,
        "advantage": table.advantage,
        "truth": table.truth,
        "success": table.success,
        "step": table.step,
        "group": table.group,
        "seed": table.seed,
        "version": table.version,
        "decisions": table.decisions,
        **({"disagreement": table.disagreement} if name == "disagreement" else {}),
        **({"spread": table.spread} if name == "spread" else {}),
    }[name]


def ordered(table: EpisodeTable, rows: Int[np.ndarray, " M"], order: str) -> Int[np.ndarray, " M"]:
    """By a column, upwards, or downwards if it begins with "-"; unknown values come last, equal ones stay in order."""
    name = order.removeprefix("-")
    if name not in ORDERS:
        raise ValueError(f"order {order!r} is unknown; there are {', '.join(ORDERS)}, and each with a - before it.")
    values = column_of(table, name)[rows].astype(float)
    if order.startswith("-"):
        values = -values
    return rows[np.argsort(values, kind="stable")]  # NaN sorts last


def _words(text: str) -> list[str]:
    """Split at blanks outside double quotes; the quotes go."""
    words, word, is_quoted = [], "", False
    for letter in text:
        if letter == '"':
            is_quoted = not is_quoted
        elif letter.isspace() and not is_quoted:
            words.append(word)
            word = ""
        else:
            word += letter
    if is_quoted:
        raise ValueError(f"filter {text!r} has a quote that does not end.")
    return [one for one in (*words, word) if one]


def _yes(found: dict[str, list[str]], name: str) -> bool | None:
    said = {"yes": True, "no": False}
    values = found.get(name, [])
    if any(value not in said for value in values) or len(set(values)) > 1:
        raise ValueError(f"filter {name}:{values[-1]} cannot be: wanted {name}:yes or {name}:no, once.")
    return said[values[0]] if values else None


def _range(column: Column, text: str) -> Range:
    low, dots, high = text.partition("..")
    try:
        numbers = [float(low) if low else -np.inf, float(high) if high else np.inf] if dots else [float(text)] * 2
    except ValueError:
        raise ValueError(f"filter {column}:{text} is no number and no range such as 0.5..1, ..1 or 0.5..") from None
    return Range(column=column, low=numbers[0], high=numbers[1])
