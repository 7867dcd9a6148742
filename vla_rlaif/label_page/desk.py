"""The desk where pairs are handed out and answers taken in: leases, repeated questions, undo. No network, no threads.

Every method takes the time as ``now``, seconds since 1970. What must outlive the process is in the store before a
method returns; leases are not, and a person who answers after a restart is heard all the same.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vla_rlaif.label_page.annotators import Person, Turn, labeller_of, read_people
from vla_rlaif.label_page.queue import Pair, PairQueue
from vla_rlaif.preferences.store import Preference, PreferenceStore


@dataclass(frozen=True, kw_only=True)
class DeskSettings:
    """How questions are handed out."""

    wanted: int  # pairs to be labelled in all, by anybody
    repeat: float = 0.1  # share of the questions that ask for a labelled pair again, to measure agreement
    repeat_after: int = 20  # questions that lie between a person's answer and its repetition
    lease_s: float = 300.0  # a pair that is not answered for so long goes to somebody else
    seed: int = 0

    def __post_init__(self) -> None:
        if self.wanted < 1:
            raise ValueError(f"{self.wanted} pairs are wanted; it must be at least 1.")
        if not 0 <= self.repeat < 1 or self.repeat_after < 1 or self.lease_s <= 0:
            raise ValueError(
                "repeat must be in [0, 1), repeat_after at least 1 and lease_s positive; got "
                f"{self.repeat}, {self.repeat_after} and {self.lease_s}."
            )


@dataclass(frozen=True, kw_only=True)
class Question:
    """A pair that a person is asked about. ``previous`` is the answer that was taken back, if this is such a pair."""

    pair: Pair
    is_reopened: bool = False
    previous: float | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Pairs with an answer in force, and how often a pair was asked for again."""

    done: int
    wanted: int
    repeats: int


@dataclass(kw_only=True)
class _Lease:
    pair: Pair
    until: float
    is_repeat: bool = False


class LabelDesk:
    """Any number of people at one desk. Open it in the thread that owns ``store``."""

    def __init__(
        self,
        store: PreferenceStore,
        queue: PairQueue,
        settings: DeskSettings,
        *,
        instruction: Callable[[str], str],
        segment: tuple[int, int],
    ) -> None:
        """``instruction`` is that of an episode, by its id; ``segment`` is kept with every record."""
        self._store, self._queue, self._settings = store, queue, settings
        self._instruction, self._segment = instruction, segment
        self._rng = np.random.default_rng((settings.seed, store.last_id))
        self._leases: dict[str, list[_Lease]] = {}  # by name: the pair that is shown, then the one after it
        self._returned: deque[Pair] = deque()  # drawn, and left without an answer
        self.people = read_people(store.records(), store.records(history=True))
        self._turns: dict[frozenset[str], list[tuple[str, Turn]]] = {}
        for name, person in self.people.items():
            person.turns = [turn for turn in person.turns if self._enters(name, turn)]
            person.reopened = [turn for turn in person.turns if turn.is_open]

    def join(self, name: str) -> None:
        """Raises ValueError for what is no name. Whoever comes back under a name goes on where it stopped."""
        labeller_of(name)
        self.people.setdefault(name, Person())

    def question(self, name: str, now: float) -> Question | None:
        """What the person sees now; asking again gives the same. None: there is nothing left to ask."""
        self._expire(now)
        person = self._person(name)
        if person.reopened:
            turn = person.reopened[-1]
            return Question(pair=turn.pair, is_reopened=True, previous=turn.p_first)
        leases = self._leases.setdefault(name, [])
        if not leases and (lease := self._hand_out(name, now, may_steal=True)) is not None:
            leases.append(lease)
        self.renew(name, now)
        return Question(pair=leases[0].pair) if leases else None

    def upcoming(self, name: str, now: float) -> Pair | None:
        """The pair after the one that is shown, if there are plenty: its clips can be made ready."""
        leases = self._leases.get(name, [])
        if len(leases) == 1 and (lease := self._hand_out(name, now, may_steal=False)) is not None:
            leases.append(lease)
        return leases[1].pair if len(leases) == 2 else None

    def answer(self, name: str, first: str, second: str, p_first: float | None, now: float) -> bool:
        """Keep an answer about the pair as it was shown. False: the person had answered already; nothing changes.

        Raises ValueError for a pair that cannot be asked about, and if the store cannot be written: then the question
        stands. A pair whose lease ran out, or that was shown before a restart, is taken too.
        """
        person, key = self._person(name), frozenset((first, second))
        for turn in person.reopened:
            if turn.pair.key == key:
                self._append(name, turn, p_first, now, is_open=False)
                person.reopened.remove(turn)
                return True
        lease = next((lease for lease in self._leases.get(name, []) if lease.pair.key == key), None)
        if lease is None and person.has_answered(key):
            return False
        pair = lease.pair if lease is not None else self._queue.admit(first, second)
        if pair is None:
            raise ValueError(f"The episodes {first!r} and {second!r} are not a pair to be labelled here.")
        shown = Pair(first=first, second=second, held_out=pair.held_out)
        turn = Turn(pair=shown, p_first=p_first, record=0)
        self._append(name, turn, p_first, now, is_open=False)
        person.turns.append(turn)
        self._turns.setdefault(key, []).append((name, turn))
        if lease is not None:
            self._leases[name].remove(lease)
        self._returned = deque(other for other in self._returned if other.key != key)
        return True

    def undo(self, name: str, now: float) -> Question:
        """Take back the person's newest answer and ask again. Undo once more for the one before."""
        person = self._person(name)
        turn = person.newest()
        if turn is None:
            raise ValueError("There is no answer of yours to take back.")
        self._append(name, turn, None, now, is_open=True)
        person.reopened.append(turn)
        return Question(pair=turn.pair, is_reopened=True, previous=turn.p_first)

    def renew(self, name: str, now: float) -> None:
        """The person is still there."""
        for lease in self._leases.get(name, []):
            lease.until = now + self._settings.lease_s

    def leave(self, name: str) -> None:
        """The person's page has closed. The pair that was shown stays reserved for a while, as for a reload."""
        leases = self._leases.get(name, [])
        self._returned.extend(lease.pair for lease in leases[1:] if not lease.is_repeat)
        del leases[1:]

    def is_busy(self, name: str) -> bool:
        """Whether the person has been given something to answer."""
        return bool(self._leases.get(name) or self._person(name).reopened)

    def beside(self, name: str) -> list[str]:
        """The episodes that people have in hand to compare with the episode ``name``."""
        pairs = [lease.pair for leases in self._leases.values() for lease in leases]
        return [pair.second if pair.first == name else pair.first for pair in pairs if name in pair.key]

    @property
    def num_leased(self) -> int:
        """Pairs that somebody has in hand."""
        return sum(len(leases) for leases in self._leases.values()) + sum(len(p.reopened) for p in self.people.values())

    def progress(self) -> Progress:
        answered = [sum(not turn.is_open for _, turn in turns) for turns in self._turns.values()]
        done = sum(num > 0 for num in answered)
        return Progress(done=done, wanted=self._settings.wanted, repeats=sum(answered) - done)

    def opinions(self, key: frozenset[str]) -> list[tuple[str, Turn]]:
        """Every answer about a pair that is in force, with who gave it, in order."""
        return [(name, turn) for name, turn in self._turns.get(key, []) if not turn.is_open]

    def labelled(self) -> list[frozenset[str]]:
        """The pairs with an answer."""
        return [key for key in self._turns if self.opinions(key)]

    def repeated(self) -> list[frozenset[str]]:
        """The pairs with more than one answer."""
        return [key for key, turns in self._turns.items() if len(turns) > 1 and len(self.opinions(key)) > 1]

    def _person(self, name: str) -> Person:
        if name not in self.people:
            raise ValueError("Say who you are before you label.")
        return self.people[name]

    def _enters(self, name: str, turn: Turn) -> bool:
        """Count an answer of the store, if its pair is one of this queue's."""
        if self._queue.admit(turn.pair.first, turn.pair.second) is None:
            return False
        self._turns.setdefault(turn.pair.key, []).append((name, turn))
        return True

    def _append(self, name: str, turn: Turn, p_first: float | None, now: float, *, is_open: bool) -> None:
        """Write the newest word about a turn, then note it: if writing fails nothing has changed."""
        record = Preference(
            first=turn.pair.first,
            second=turn.pair.second,
            segment=self._segment,
            instruction=self._instruction(turn.pair.first),
            p_first=p_first,
            labeller=labeller_of(name),
            step=0,
            held_out=turn.pair.held_out,
            time=now,
            corrects=turn.record or None,
        )
        (turn.record,) = self._store.append([record])
        turn.is_open = is_open
        if not is_open:
            turn.p_first = p_first

    def _expire(self, now: float) -> None:
        for leases in self._leases.values():
            late = [lease for lease in leases if lease.until <= now]
            self._returned.extend(lease.pair for lease in late if not lease.is_repeat)
            leases[:] = [lease for lease in leases if lease.until > now]

    def _hand_out(self, name: str, now: float, *, may_steal: bool) -> _Lease | None:
        until = now + self._settings.lease_s
        leased = sum(not lease.is_repeat for leases in self._leases.values() for lease in leases)
        if len(self._turns) + leased < self._settings.wanted:
            if self._rng.random() < self._settings.repeat and (pair := self._repetition(name)) is not None:
                return _Lease(pair=pair, until=until, is_repeat=True)
            pair = self._returned.popleft() if self._returned else self._queue.draw()
            if pair is not None:
                return _Lease(pair=pair, until=until)
        if may_steal:
            for other, leases in self._leases.items():
                if other != name and len(leases) == 2 and not leases[1].is_repeat:
                    return _Lease(pair=leases.pop().pair, until=until)
        return None

    def _repetition(self, name: str) -> Pair | None:
        """A pair that somebody else labelled and this person did not, or one of its own from a while ago; with the
        sides changed, so that a habit of choosing one side shows."""
        turns = self.people[name].turns
        mine = Counter(turn.pair.key for turn in turns)
        asked = {lease.pair.key for lease in self._leases.get(name, [])}
        others = [key for key in self._turns if key not in mine and key not in asked]
        long_ago = [turn.pair.key for turn in turns[: -self._settings.repeat_after]]
        own = [key for key in long_ago if mine[key] == 1 and key not in asked]
        pools = [pool for pool in (others, own) if pool]
        if not pools:
            return None
        pool = pools[int(self._rng.integers(len(pools)))]
        answers = self.opinions(pool[int(self._rng.integers(len(pool)))])
        return answers[-1][1].pair.swapped if answers and answers[-1][1].p_first is not None else None
