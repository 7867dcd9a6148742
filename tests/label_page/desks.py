"""A desk over made-up episodes, and the clock that its leases run by."""

from pathlib import Path

import numpy as np
from synthetic import make_episodes

from vla_rlaif.label_page.desk import DeskSettings, LabelDesk
from vla_rlaif.label_page.queue import ListedQueue, Pair, PairQueue, SampledQueue
from vla_rlaif.preferences.store import PreferenceStore

LEASE_S = 100.0
NOON = 1_800_000_000.0  # seconds since 1970


def ids(num: int) -> list[str]:
    return [f"0:{row}" for row in range(num)]


def sampled(num: int = 16, taken: tuple[frozenset[str], ...] = (), seed: int = 0, **options) -> SampledQueue:
    """Groups of 4; by default nothing is held out."""
    episodes = make_episodes(num)
    held = options.pop("held", np.zeros(num, bool))
    settings = {"within_group": 0.5, "held_out": 0.0, "seed": seed} | options
    return SampledQueue(episodes, ids(num), held=held, taken=taken, **settings)


def listed(*pairs: tuple[int, int]) -> ListedQueue:
    return ListedQueue([Pair(first=f"0:{a}", second=f"0:{b}") for a, b in pairs])


def desk_of(store: PreferenceStore, queue: PairQueue | None = None, **settings) -> LabelDesk:
    settings = {"wanted": 20, "repeat": 0.0, "lease_s": LEASE_S} | settings
    queue = sampled() if queue is None else queue
    return LabelDesk(store, queue, DeskSettings(**settings), instruction=lambda name: "reach the cube", segment=(0, 4))


def open_store(folder: Path) -> PreferenceStore:
    return PreferenceStore(folder / "labels.sqlite", timeout_s=0.05)


def ask(desk: LabelDesk, name: str, now: float = NOON) -> Pair:
    question = desk.question(name, now)
    assert question is not None
    return question.pair


def reply(desk: LabelDesk, name: str, p_first: float | None = 1.0, now: float = NOON) -> Pair:
    """Answer what the person is asked."""
    pair = ask(desk, name, now)
    assert desk.answer(name, pair.first, pair.second, p_first, now)
    return pair
