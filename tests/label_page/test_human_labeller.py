"""People as a run's labeller: the run waits on one thread while a person answers over the page's socket."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from synthetic import make_episodes
from websockets.asyncio.client import connect

from vla_rlaif.interfaces import Labeller
from vla_rlaif.label_page.human import HumanLabeller
from vla_rlaif.label_page.settings import PageSettings
from vla_rlaif.preferences.labelling import ask, make_records
from vla_rlaif.preferences.store import PreferenceStore

PAIRS = np.array([(0, 1), (3, 2), (4, 5), (6, 7)])


@contextmanager
def labeller_in(folder, *, deadline_s=20.0, skip=False, undo_s=0.0, **settings):
    said = []
    page = PageSettings(**({"port": 0, "repeat": 0.0} | settings))
    labeller = HumanLabeller(
        folder / "human.sqlite", page, deadline_s=deadline_s, skip_at_deadline=skip, say=said.append, undo_s=undo_s
    )
    try:
        yield labeller, said
    finally:
        labeller.close()


class Person(threading.Thread):
    """Opens the address that was said and gives ``answers``, then does what is in ``after``."""

    def __init__(self, said, name, answers, *, after=()):
        super().__init__(daemon=True)
        self._said, self._name, self._answers, self._after = said, name, list(answers), list(after)
        self.texts = []

    def run(self):
        asyncio.run(asyncio.wait_for(self._label(), 20))

    async def _label(self):
        while not any("label at " in text for text in self._said):
            await asyncio.sleep(0.01)
        url = next(text for text in self._said if "label at " in text).split("label at ")[1]
        parts = urlsplit(url)
        origin: Any = f"{parts.scheme}://{parts.netloc}"
        async with connect(f"ws://{parts.netloc}{parts.path}socket", origin=origin) as page:
            await page.send(json.dumps({"type": "join", "name": self._name}))
            for message in [*self._answers, *self._after]:
                state = json.loads(await page.recv())
                while state["type"] != "state" or (message != "undo" and not state.get("question")):
                    state = json.loads(await page.recv())
                self.texts.append(state["text"])
                if message == "undo":
                    await page.send(json.dumps({"type": "undo"}))
                    continue
                left, right = (state["question"][side]["id"] for side in ("left", "right"))
                await page.send(json.dumps({"type": "answer", "left": left, "right": right, "answer": message}))
            async for text in page:
                self.texts.append(json.loads(text)["text"])


def records(folder):
    with PreferenceStore(folder / "human.sqlite") as store:
        return store.records()


def test_training_waits_for_a_persons_labels(tmp_path):
    episodes = make_episodes(8)
    with labeller_in(tmp_path) as (labeller, said):
        assert isinstance(labeller, Labeller)
        ana = Person(said, "ana", ["left", "right", "tie", "skip"])
        ana.start()
        labels = labeller.label(episodes, PAIRS, 0)
        np.testing.assert_array_equal(labels, [1.0, 0.0, 0.5, np.nan])
        assert labeller.name == "human/ana"
        assert said[0].startswith("training waits for 4 labels within 20 s (until ") and "/" in said[0]
        assert said[1] == "4 labels by ana; 0 pairs skipped"
    assert [r.labeller for r in records(tmp_path)] == ["human/ana"] * 4


def test_a_second_round_comes_to_the_open_page(tmp_path):
    with labeller_in(tmp_path) as (labeller, said):
        ana = Person(said, "ana", ["left"] * 8)
        ana.start()
        assert labeller.label(make_episodes(8, seed=0), PAIRS, 0).tolist() == [1.0] * 4
        assert labeller.label(make_episodes(8, seed=1), PAIRS, 1).tolist() == [1.0] * 4


def test_a_stopped_run_asks_nothing_twice(tmp_path):
    episodes = make_episodes(8)
    with labeller_in(tmp_path, deadline_s=1.0) as (labeller, said):
        Person(said, "ana", ["left", "right"]).start()
        with pytest.raises(ValueError, match=r"2 of 4 labels were not given within 1 s.*go on with --resume"):
            labeller.label(episodes, PAIRS, 0)
    with labeller_in(tmp_path) as (labeller, said):
        Person(said, "ben", ["tie", "tie"]).start()
        # The same episodes again, and the pairs the other way round.
        assert labeller.label(episodes, PAIRS[:, ::-1], 0).tolist() == [0.0, 1.0, 0.5, 0.5]
        assert labeller.name == "human/ana+ben" and said[0].startswith("training waits for 2 labels")
    with labeller_in(tmp_path, deadline_s=5.0) as (labeller, said):
        assert labeller.label(episodes, PAIRS, 0).tolist() == [1.0, 0.0, 0.5, 0.5]


def test_at_the_deadline_missing_labels_are_skips_if_wanted(tmp_path):
    with labeller_in(tmp_path, deadline_s=1.0, skip=True) as (labeller, said):
        Person(said, "ana", ["left"]).start()
        labels = labeller.label(make_episodes(8), PAIRS, 0)
    assert labels[0] == 1.0 and np.isnan(labels[1:]).all()
    assert said[-1] == "1 labels by ana; 3 pairs skipped"


def test_the_last_answer_can_be_taken_back(tmp_path):
    with labeller_in(tmp_path, undo_s=0.5) as (labeller, said):
        Person(said, "ana", ["left"] * 4, after=["undo", "right"]).start()
        assert labeller.label(make_episodes(8), PAIRS, 0).tolist() == [1.0, 1.0, 1.0, 0.0]


def test_what_needs_no_person_is_not_asked(tmp_path):
    valid = np.arange(8) != 3
    episodes = make_episodes(8, valid=valid)
    for images in episodes.images.values():
        images[5] = images[4]  # looks the same
    with labeller_in(tmp_path) as (labeller, said):
        assert np.array_equal(labeller.label(episodes, PAIRS[1:3], 0), [np.nan, 0.5], equal_nan=True)
        assert said == [] and labeller.name == "human/"
        Person(said, "ana", ["left", "left"]).start()
        labels = labeller.label(episodes, np.concatenate([PAIRS, PAIRS[:1, ::-1]]), 0)
        assert np.array_equal(labels, [1.0, np.nan, 0.5, 1.0, 0.0], equal_nan=True)  # the last is the first, swapped


def test_records_of_a_run_name_the_people(tmp_path):
    """As a refresh, or `vla-rlaif label CONFIG` with a human labeller, asks and stores."""
    episodes, held = make_episodes(8), np.array([False, False, False, True])
    with labeller_in(tmp_path) as (labeller, said):
        Person(said, "ana", ["left", "right", "tie", "skip"]).start()
        answers = ask(labeller, episodes, PAIRS, 0)
        ids = [f"3:{row}" for row in range(8)]
        found = make_records(episodes, ids, PAIRS, answers, held, labeller=labeller.name, step=3)
    assert [(r.first, r.p_first) for r in found] == [("3:0", 1.0), ("3:3", 0.0), ("3:4", 0.5), ("3:6", None)]
    assert {r.labeller for r in found} == {"human/ana"}


def test_a_port_in_use_ends_the_run_at_once(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with labeller_in(tmp_path, port=port) as (labeller, _), pytest.raises(ValueError, match="cannot listen on"):
            labeller.label(make_episodes(8), PAIRS, 0)


def test_an_unknown_camera_is_named(tmp_path):
    with (
        labeller_in(tmp_path, cameras=("wrist",)) as (labeller, _),
        pytest.raises(ValueError, match=r"reward.labeller.cameras names 'wrist'; the env has top"),
    ):
        labeller.label(make_episodes(8), PAIRS, 0)


def test_a_deadline_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="deadline_s"):
        HumanLabeller(tmp_path / "x", PageSettings(), deadline_s=0.0, skip_at_deadline=False, say=print)
