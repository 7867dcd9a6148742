"""What each person has answered, as the store has it: the state that survives a restart.

A person's answers are stored as labeller ``human/<name>``. Undo appends a correcting record without a label, and the
new answer corrects that one, so answers and withdrawals alternate in every chain of corrections.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vla_rlaif.label_page.queue import Pair
from vla_rlaif.preferences.store import Preference

PREFIX = "human/"
MAX_NAME = 40  # characters
_NAME = re.compile(r"[^\W_]([\w .-]*[\w.-])?")


def labeller_of(name: str) -> str:
    """``human/<name>``, if that is a name."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[: 2 * MAX_NAME]!r} is no name: use 1 to {MAX_NAME} letters, digits, spaces and . _ - beginning "
            "with a letter or a digit."
        )
    return PREFIX + name


@dataclass(kw_only=True)
class Turn:
    """One question to one person and the newest word about it."""

    pair: Pair
    p_first: float | None  # None: skipped; of an open turn, what was withdrawn
    record: int  # id of the newest record about it
    is_open: bool = False  # withdrawn: it waits for another answer


@dataclass(kw_only=True)
class Person:
    """Turns in the order of their questions; ``reopened`` are those that wait for another answer, next one last."""

    turns: list[Turn] = field(default_factory=list)
    reopened: list[Turn] = field(default_factory=list)

    def newest(self) -> Turn | None:
        """The latest question with an answer."""
        return next((turn for turn in reversed(self.turns) if not turn.is_open), None)

    def has_answered(self, key: frozenset[str]) -> bool:
        return any(turn.pair.key == key and not turn.is_open for turn in self.turns)

    def counts(self) -> dict[str, int]:
        answers = [turn.p_first for turn in self.turns if not turn.is_open]
        return {"labels": len(answers), "ties": answers.count(0.5), "skips": answers.count(None)}


def read_people(in_force: Iterable[Preference], history: Iterable[Preference]) -> dict[str, Person]:
    """Everybody who labelled by hand, by name, from the records in force and all that were ever appended."""
    by_id = {r.id: r for r in history}
    people: dict[str, Person] = {}
    turns = [(*_root(r, by_id), r) for r in in_force if r.labeller.startswith(PREFIX)]
    for _, depth, record in sorted(turns, key=lambda item: item[0]):
        assert record.id is not None, "a record of the store has an id"
        pair = Pair(first=record.first, second=record.second, held_out=record.held_out)
        is_open = depth % 2 == 1
        p_first = by_id[record.corrects].p_first if is_open else record.p_first
        turn = Turn(pair=pair, p_first=p_first, record=record.id, is_open=is_open)
        person = people.setdefault(record.labeller.removeprefix(PREFIX), Person())
        person.turns.append(turn)
        if turn.is_open:
            person.reopened.append(turn)
    return people


def _root(record: Preference, by_id: Mapping[int | None, Preference]) -> tuple[int, int]:
    """The id that a chain of corrections began with, and how many corrections there are."""
    depth = 0
    while record.corrects is not None:
        record, depth = by_id[record.corrects], depth + 1
    assert record.id is not None
    return record.id, depth
