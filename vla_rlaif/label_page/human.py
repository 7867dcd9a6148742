"""People as the labeller of a run: training waits while they label its pairs on the page.

Answers are kept in a store of their own. Its episodes are named by what they show, so a run that was stopped while
people labelled asks them nothing twice when it plays the same episodes again.

Axes: M pairs.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.label_page.room import Room
from vla_rlaif.label_page.rounds import Round
from vla_rlaif.label_page.server import check_address
from vla_rlaif.label_page.settings import PageSettings
from vla_rlaif.types import EnvSpec, Episodes

UNDO_S = 5.0  # after the last answer of a round, in which it can still be taken back


class HumanLabeller:
    """Opens the page with its first pairs and keeps it open until ``close``."""

    def __init__(
        self,
        store: Path,
        settings: PageSettings,
        *,
        deadline_s: float,
        skip_at_deadline: bool,
        say: Callable[[str], None],
        undo_s: float = UNDO_S,
    ) -> None:
        """``store`` is the SQLite file of the answers. Labels that are missing ``deadline_s`` after they were asked for
        are skips with ``skip_at_deadline``, and an error without."""
        if not deadline_s > 0:
            raise ValueError(f"deadline_s is {deadline_s}; it must be positive.")
        self._path, self._settings, self._say = store, settings, say
        self._deadline_s, self._skips, self._undo_s = deadline_s, skip_at_deadline, undo_s
        self._room: Room | None = None
        self._names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """With the people who gave the newest labels."""
        return "human/" + "+".join(self._names)

    def probe(self, spec: EnvSpec) -> None:
        """Raises ValueError for what would stop the run when it comes to its first labels."""
        unknown = sorted(set(self._settings.cameras) - set(spec.cameras))
        if unknown:
            raise ValueError(
                f"reward.labeller.cameras names {unknown[0]!r}; the env has the cameras {', '.join(spec.cameras)}."
            )
        check_address(self._settings.host, self._settings.port)

    def label(self, episodes: Episodes, pairs: Int[np.ndarray, "M 2"], seed: int) -> Float[np.ndarray, " M"]:
        """Returns when every pair has an answer. Pairs of an invalid episode, and of two clips that look the same, are
        not asked: the first are skips, the second ties."""
        round_, self._names = Round(episodes, pairs, self._settings.cameras), ()
        if not round_.pairs:
            return round_.labels({})
        if self._room is None:
            self._room = Room(self._path, self._settings)
        s, room, within = self._settings, self._room, f"within {_say_time(self._deadline_s)}"
        num = room.begin(round_, deadline_s=self._deadline_s, repeat=s.repeat, lease_s=s.lease_s, seed=seed)
        until = time.strftime("%H:%M", time.localtime(time.time() + self._deadline_s))
        self._say(f"training waits for {num} labels {within} (until {until}): label at {room.url}")
        is_done = room.wait(self._deadline_s, self._undo_s)
        answers, self._names = room.finish()
        missing = len(round_.pairs) - len(answers)
        if not is_done and not self._skips:
            raise ValueError(
                f"{missing} of {len(round_.pairs)} labels were not given {within}. The others are in {self._path}: "
                "go on with --resume and a longer reward.labeller.deadline_s, or with at_deadline: skip."
            )
        self._say(f"{len(answers)} labels by {', '.join(self._names) or 'nobody'}; {missing} pairs skipped")
        return round_.labels(answers)

    def close(self) -> None:
        if self._room is not None:
            self._room.close()
            self._room = None


def _say_time(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds >= 7200
        else f"{seconds / 60:.0f} min"
        if seconds >= 120
        else f"{seconds:.0f} s"
    )
