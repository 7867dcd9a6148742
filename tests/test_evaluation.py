"""Evaluations: what is played, what is computed of it (against scipy), where policies may come from, and the page."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from vla_rlaif.build import build_env, build_policy, load_folder
from vla_rlaif.checkpoint import load_policy, save_policy
from vla_rlaif.config import RunConfig, parse_config
from vla_rlaif.evaluate import evaluate
from vla_rlaif.evaluation import Evaluated, Footage, Side, chosen_starts, rate_of
from vla_rlaif.evaluation_page import MAX_FRAMES, MAX_SIDE, as_json, chosen_clips, page, shortened, spoken
from vla_rlaif.evaluation_verb import Request, evaluate_policies
from vla_rlaif.lerobot_config import LeRobotConfig
from vla_rlaif.policies.specs import spec_to_json
from vla_rlaif.policy_config import OctoCheckpointConfig
from vla_rlaif.policy_source import Source, find_source
from vla_rlaif.rollout import Split, start_seed
from vla_rlaif.rollouts_local import LocalRollouts
from vla_rlaif.types import Decision, EnvSpec, Observation, Starts, Weights

RUN: dict[str, Any] = {
    "name": "test",
    "env": {"type": "point_reach", "num_envs": 8, "max_decisions": 3, "radius": 0.2},
    "policy": {"type": "gaussian", "backend": "torch"},
    "reward": {"type": "success"},
    "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2},
    "evaluate": {"episodes": 20, "clips": 2},
}


def config(**sections: Any) -> RunConfig:
    return parse_config({**RUN, **sections}, source="test")


def gaussian(folder: Path, gain: float) -> Path:
    """A policy folder: the action is ``gain`` times the way to the goal."""
    policy = build_policy(config().policy, build_env(config().env).spec, 0)
    weight = np.hstack([-gain * np.eye(2), gain * np.eye(2)]).astype(np.float32)  # [A P]
    save_policy(folder, policy.metadata(), {"weight": weight, "bias": np.zeros(2, np.float32)})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    at = tmp_path_factory.mktemp("policies")
    return gaussian(at / "good", 2.0), gaussian(at / "poor", 0.8)


def run(asked: Request, **sections: Any) -> tuple[list[str], dict[str, Any]]:
    said: list[str] = []
    evaluate_policies(config(**sections), asked, said.append)
    return said, json.loads(asked.to.read_text()) if asked.to else {}


def test_one_policy_is_measured_as_a_run_measures_it(folders, tmp_path):
    good, _ = folders
    said, found = run(Request(policy=(str(good),), to=tmp_path / "a.json"))
    c = config()
    env = build_env(c.env)
    whole = evaluate(LocalRollouts(load_folder(good, c, env.spec), env), split=Split.TEST, episodes=20)
    assert found["outcomes"] == whole.outcomes.tolist() and 0 < whole.success < 1
    wilson = scipy.stats.binomtest(sum(found["outcomes"]), 20).proportion_ci(0.95, method="wilson")
    assert found["ci95"] == pytest.approx([wilson.low, wilson.high]) and found["success"] == whole.success
    assert found["start_seeds"] == [start_seed(Split.TEST, i) for i in range(20)]  # each once, disjoint from training
    assert said[0].startswith(f"success {whole.success:.3f}, 95 % interval [{wilson.low:.3f}, {wilson.high:.3f}], 20 ")
    assert found["a"]["policies"][0]["kind"] == "vla_rlaif"
    assert found["manifest"]["versions"]["numpy"] == np.__version__ and found["config"]["name"] == "test"


def test_two_policies_on_the_same_starts(folders, tmp_path):
    good, poor = map(str, folders)
    _, alone = run(Request(policy=(poor,), to=tmp_path / "poor.json"))
    said, found = run(Request(policy=(good,), against=(poor,), to=tmp_path / "both.json"))
    a, b = (np.array(found[side]["outcomes"][0]) for side in "ab")
    assert b.tolist() == alone["outcomes"]
    better, worse = int((a & ~b).sum()), int((b & ~a).sum())
    assert better > 3
    expected = {
        "difference": (better - worse) / 20,
        "a_better": better,
        "b_better": worse,
        "p_value": scipy.stats.binomtest(better, better + worse).pvalue,
    }
    compared = found["comparison"]
    assert {k: compared[k] for k in expected} == pytest.approx(expected)
    each = (a * 1.0 - b,)
    theirs = scipy.stats.bootstrap(each, np.mean, method="BCa", rng=np.random.default_rng(0)).confidence_interval
    assert compared["ci95"] == pytest.approx([theirs.low, theirs.high], abs=0.051)  # a start is 0.05
    assert f"A is better on {better} start states, B on {worse}" in said[4]
    back = run(Request(policy=(poor,), against=(good,), to=tmp_path / "back.json"))[1]["comparison"]
    assert (back["difference"], back["p_value"]) == (-compared["difference"], compared["p_value"])


class Noisy:
    """Goes to the goal, or away from it if its noise says so: outcomes depend on the seed, without any sampling."""

    window = 1

    def __init__(self, spec: EnvSpec, *, seed: int, gain: float = 0.8) -> None:
        self.spec, self.version, self._gain = spec, 0, np.float32(gain)

    @property
    def params(self) -> Weights:
        return {"gain": np.asarray(self._gain)}

    def metadata(self) -> dict[str, Any]:
        return {"spec": spec_to_json(self.spec)}

    def load(self, weights: Weights, version: int) -> None:
        self._gain, self.version = np.float32(weights["gain"]), version

    def act(self, obs: Observation, seeds: np.ndarray, *, noise_scale: float = 1.0) -> Decision:
        sign = np.array([np.random.default_rng(int(s)).choice([1, 1, 1, -1]) for s in seeds])
        action = (sign[:, None] * self._gain * (obs.state[:, 2:] - obs.state[:, :2])).astype(np.float32)
        return Decision(action=action[:, None], logp=np.zeros((len(seeds), 1), np.float32), trace={})


def test_several_policies_and_noise_seeds(tmp_path):
    """Two folders of two training runs, two noise seeds: four repetitions of the same starts, resampled by start."""
    spec = build_env(config().env).spec
    for name, gain in (("one", 4.0), ("two", 2.5)):
        save_policy(tmp_path / name, Noisy(spec, seed=0).metadata(), {"gain": np.array(gain, np.float32)})
    policy = {"type": "custom", "factory": f"{__name__}:Noisy", "backend": "torch"}
    names = tuple(str(tmp_path / name) for name in ("one", "two"))
    asked = Request(policy=names, noise_seeds=(0, 5), to=tmp_path / "all.json")
    said, found = run(asked, policy=policy)
    outcomes = np.array(found["a"]["outcomes"])
    assert outcomes.shape == (4, 20) and found["outcomes"] == outcomes.tolist()
    assert (outcomes[0] != outcomes[1]).any()  # other noise
    again = run(Request(policy=names[1:], noise_seeds=(5,), to=tmp_path / "one.json"), policy=policy)[1]
    assert again["outcomes"] == outcomes[3].tolist()  # ordered by policy, then by seed
    means = (outcomes.mean(axis=0),)
    theirs = scipy.stats.bootstrap(means, np.mean, method="BCa", rng=np.random.default_rng(0)).confidence_interval
    assert found["ci95"] == pytest.approx([theirs.low, theirs.high], abs=0.03)
    assert found["interval"] == "bootstrap over start states" and "20 episodes x 4 repetitions" in said[-2]
    each = [p["success"] for p in found["a"]["policies"]]
    assert each == [outcomes[:2].mean(), outcomes[2:].mean()]


def test_first_seed_chooses_the_starts(folders, tmp_path):
    _, found = run(Request(policy=(str(folders[0]),), first_seed=1000, to=tmp_path / "a.json"))
    assert found["start_seeds"] == list(range(1000, 1020))


def test_starts_that_the_env_goes_through_again_are_counted():
    spec = replace(build_env(config().env).spec, num_tasks=2, num_starts=3)
    for num, repeats in ((6, 0), (7, 1), (12, 1), (13, 2)):
        starts, found = chosen_starts(spec, num, None)
        assert found == repeats and len(set(starts.seed.tolist())) == num


def test_a_folder_brings_its_own_settings(folders, tmp_path):
    """The config speaks of another kind of policy; only what it says of the env, and of evaluation, is used."""
    good, _ = folders
    asked = Request(policy=(str(good),), to=tmp_path / "a.json")
    own, other = run(asked)[1], run(asked, policy={"type": "mlp"})[1]
    assert own["outcomes"] == other["outcomes"]
    source = find_source(str(good), config(policy={"type": "mlp"}))
    assert source.config.policy == config().policy


def test_folders_of_others_are_recognised(tmp_path):
    (tmp_path / "octo").mkdir()
    (tmp_path / "octo" / "dataset_statistics.json").write_text("{}")
    (tmp_path / "lerobot").mkdir()
    (tmp_path / "lerobot" / "policy_preprocessor.json").write_text("{}")
    octo, lerobot = (find_source(str(tmp_path / name), config()) for name in ("octo", "lerobot"))
    assert (octo.kind, octo.config.policy) == ("official Octo", OctoCheckpointConfig(folder=tmp_path / "octo"))
    assert (lerobot.kind, lerobot.config.policy) == ("LeRobot", LeRobotConfig(path=str(tmp_path / "lerobot")))
    theirs = config(
        env={"type": "tabletop", "num_envs": 8},
        policy={"type": "octo_checkpoint", "folder": "x", "dataset": "bridge"},
        algorithm={"group_size": 4},
    )
    assert find_source(str(tmp_path / "octo"), theirs).config == theirs  # its settings go on being the config's
    assert find_source("wss://robot:8000", config()).kind == "policy server"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Request(policy=()), "--policy names no policy"),
        (Request(policy=("nowhere",)), "no policy checkpoint at nowhere"),
        (Request(policy=("http://robot",)), r"not a policy server's address; those begin with ws:// or wss://"),
        (Request(policy=("a",), noise_seeds=(1, 1)), "name each once"),
        (Request(policy=("a",), to=Path("a.html")), r"wanted a \.json file"),
        (Request(policy=("ws://127.0.0.1:9",)), "there is no policy server at ws://127"),
    ],
)
def test_mistakes(asked, message):
    with pytest.raises(ValueError, match=message):
        run(asked)


def test_a_run_directory_is_not_a_policy_and_names_those_in_it(folders):
    with pytest.raises(ValueError, match=r"no policy checkpoint at .*There are policies in it: \S*good, \S*poor"):
        run(Request(policy=(str(folders[0].parent),)))


def test_damaged_settings_of_a_folder(folders, tmp_path):
    metadata, weights = load_policy(folders[0])
    save_policy(tmp_path / "odd", {**metadata, "config": {"type": "gaussian", "std": -1}}, weights)
    with pytest.raises(ValueError, match="policy of type 'gaussian', the config wants 'mlp', and its own settings"):
        find_source(str(tmp_path / "odd"), config(policy={"type": "mlp"}))


def by_hand(tmp_path: Path, *, b: bool = True) -> tuple[Evaluated, Footage]:
    """6 starts of two tasks. A wins 0, 1, 2, 4; B wins 1, 3, 4."""
    rng = np.random.default_rng(0)
    footage = Footage(tmp_path)
    for side in "ab":
        footage.keep(side, np.arange(4), rng.integers(0, 256, (4, 5, 8, 8, 3), np.uint8))
        footage.keep(side, np.arange(4, 6), rng.integers(0, 256, (2, 5, 8, 8, 3), np.uint8))
    side = lambda name, wins: Side(  # noqa: E731
        sources=(Source(name=name, kind="vla_rlaif", config=config()),),
        outcomes=np.isin(np.arange(6), wins)[None],
        env_steps=np.full((1, 6), 3),
        broken=0,
    )
    found = Evaluated(
        starts=Starts(seed=np.arange(6), group=np.arange(6), member=np.zeros(6, np.int64)),
        instruction=("lift", "drop <b>", "lift", "drop <b>", "lift", "drop <b>"),
        noise_seeds=(0,),
        a=side("a<i>", [0, 1, 2, 4]),
        b=side("b", [1, 3, 4]) if b else None,
        num_repeats=1,
    )
    return found, footage


def test_tasks_by_hand(tmp_path):
    """lift: A wins 3 of 3, B 1 of 3 (A alone 2); drop: A 1 of 3, B 2 of 3 (B alone 1)."""
    found, _ = by_hand(tmp_path)
    lift, drop = as_json(found)["tasks"]
    wilson = scipy.stats.binomtest(3, 3).proportion_ci(0.95, method="wilson")
    assert lift["a"] == {"success": 1.0, "ci95": [pytest.approx(wilson.low), 1.0]}
    assert (lift["comparison"]["a_better"], lift["comparison"]["b_better"], lift["comparison"]["p_value"]) == (
        2,
        0,
        0.5,
    )
    assert drop["task"] == "drop <b>" and drop["a"]["success"] == pytest.approx(1 / 3)
    assert drop["b"]["success"] == pytest.approx(2 / 3) and drop["comparison"]["p_value"] == 1.0
    lines = spoken(found)
    assert "goes through them 2 times" in lines[3]
    assert lines[4].startswith("  lift: 1.000 [0.439, 1.000] of 3, against 0.333 [") and lines[4].endswith("p = 0.5")


def test_what_is_shown(tmp_path):
    found, _ = by_hand(tmp_path)
    assert chosen_clips(found, 9) == {"A wins, B loses": [0, 2], "B wins, A loses": [3]}
    assert chosen_clips(found, 1) == {"A wins, B loses": [0], "B wins, A loses": [3]}
    alone, _ = by_hand(tmp_path, b=False)
    assert chosen_clips(alone, 9) == {"Wins": [0, 1, 2, 4], "Losses": [3, 5]}


def test_clips_are_bounded_and_end_with_the_end():
    frames = np.arange(100, dtype=np.uint8)[:, None, None, None] * np.ones((1, 330, 320, 3), np.uint8)
    short = shortened(frames)
    assert short.shape == (MAX_FRAMES, 110, 107, 3) and max(short.shape[1:3]) <= MAX_SIDE
    assert (short[0, 0, 0, 0], short[-1, 0, 0, 0]) == (0, 99)
    assert shortened(frames[:3, :8, :8]).shape == (3, 8, 8, 3)


class Checked(HTMLParser):
    """What a page refers to, what it shows, and that its tags are closed."""

    VOID = ("meta", "img", "source", "link", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.alts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "srcset", "href", "xlink:href")]
        self.alts += [v or "" for k, v in attrs if k == "alt"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [v or "" for k, v in attrs if k in ("src", "srcset", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_escapes(tmp_path):
    found, footage = by_hand(tmp_path)
    text = page(found, footage, clips=2, about={"Command": "evaluate <x>"})
    checked = Checked()
    checked.feed(text)
    assert not checked.open
    assert all(link.startswith(("data:image/", "#")) for link in checked.links)
    assert [alt.partition(". Instr")[0] for alt in checked.alts] == [
        *("A, start state 0: win", "B, start state 0: loss", "A, start state 2: win", "B, start state 2: loss"),
        *("A, start state 3: loss", "B, start state 3: win"),
    ]
    assert "<i>" not in text and "a&lt;i&gt;" in text and "drop &lt;b&gt;" in text and "evaluate &lt;x&gt;" in text
    assert "<script" not in text and not re.search(r"https?://(?!www\.w3\.org)", text)


def test_a_page_without_losses_or_cameras_says_so(tmp_path):
    found, _ = by_hand(tmp_path)
    same = replace(found, b=found.a)
    assert page(same, Footage(tmp_path), clips=2, about={}).count("There is no such episode.") == 2
    assert page(found, Footage(tmp_path), clips=2, about={}).count("The env has no camera.") == 2
    assert "Wins" not in page(replace(found, b=None), None, clips=2, about={})


def test_one_repetition_has_wilsons_interval():
    outcomes = np.array([[True, False, True]])
    assert rate_of(outcomes).method == "Wilson"
    assert rate_of(np.repeat(outcomes, 2, axis=0)).method == "bootstrap over start states"
