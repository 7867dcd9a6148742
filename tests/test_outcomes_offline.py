"""Outcomes from `label` to the card, on the smallest env: what is asked, what teaches the heads, what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from vla_rlaif import offline
from vla_rlaif.build import build_env, build_policy
from vla_rlaif.build_clips import clips_of_folder
from vla_rlaif.config import parse_config
from vla_rlaif.dataset import Demonstrations, append_episodes, save_demonstrations
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.offline import learned_settings
from vla_rlaif.preferences.clips import KINDS
from vla_rlaif.preferences.data import EpisodeFeatures
from vla_rlaif.preferences.labelled import gather_episodes
from vla_rlaif.preferences.outcome_store import OutcomeStore, outcome_path
from vla_rlaif.preferences.store import PreferenceStore
from vla_rlaif.reward_verb import Files, reward
from vla_rlaif.rollout import rollout, train_starts

HEADS = ["return", "progress", "success"]
NEAR = 0.5  # radius: about a third of the episodes succeed


def config(**changed):
    settings = {
        **{"type": "preference", "encoder": {"type": "color_points", "things": {"goal": [1, 0, 0]}}},
        **{"members": 2, "hidden": [16], "fit_steps": 40, "held_out": 0.25},
        **{"heads": HEADS, "outcomes": ["demonstrations", "labeller"], "false_positive_rate": 0.2},
    }
    sections = {
        "env": {"type": "point_reach", "num_envs": 16, "radius": NEAR},
        "policy": {"type": "mlp"},
        "warm_start": {"data": "nowhere"},
        "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2},
        "reward": settings | changed,
    }
    return parse_config(sections, source="test")


def demonstrations(num=12, steps=6):
    """Straight to the goal: a step of a unit action moves the point 0.25."""
    env = PointReach(num, max_decisions=steps, radius=0.1)
    now, seen, actions, live = env.reset(np.arange(num)), [], [], []
    for _ in range(steps):
        seen.append(now.obs)
        live.append(~now.done)
        way = np.clip((now.obs.state[:, 2:] - now.obs.state[:, :2]) / 0.25, -1, 1)
        actions.append(np.where(now.done[:, None], 0, way).astype(np.float32))
        now = env.step(actions[-1][:, None])
    return Demonstrations(
        images={"top": np.stack([obs.images["top"] for obs in seen], axis=1)},
        state=np.stack([obs.state for obs in seen], axis=1),
        instruction=seen[0].instruction,
        action=np.stack(actions, axis=1),
        mask=np.stack(live, axis=1),
        success=now.success,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Episodes of a policy that wanders, and demonstrations."""
    folder = tmp_path_factory.mktemp("outcomes")
    env = build_env(config().env)
    played = rollout(build_policy(config().policy, env.spec, 0), env, train_starts(0, 0, 12, 4), seed=0)
    append_episodes(folder / "data", played, {})
    save_demonstrations(folder / "demos", demonstrations(), {})
    return folder


@pytest.fixture
def labelled(folder, tmp_path):
    """The files of the verb, after 100 labels and 20 outcomes."""
    files = Files(
        data=folder / "data",
        store=tmp_path / "labels.sqlite",
        model=tmp_path / "reward.safetensors",
        demos=folder / "demos",
    )
    said = []
    offline.label(config(), files.data, files.store, 100, said.append, num_outcomes=20)
    assert said[-1].startswith(f"{outcome_path(files.store)}: 20 outcomes (asked for 20), ")
    return files


def outcomes(files):
    with OutcomeStore(outcome_path(files.store)) as kept:
        return kept.newest()


def test_outcomes_are_the_oracles_and_of_compared_episodes(labelled):
    ids, episodes = gather_episodes(labelled.data)
    success = dict(zip(ids, episodes.success.tolist(), strict=True))
    first = outcomes(labelled)
    assert {name: one.p_success for name, one in first.items()} == {name: float(success[name]) for name in first}
    assert {one.p_success for one in first.values()} == {0.0, 1.0}
    said = []
    offline.label(config(), labelled.data, labelled.store, 10, said.append, num_outcomes=1000)
    with PreferenceStore(labelled.store) as kept:
        compared = {name for r in kept.records() for name in (r.first, r.second)}
    second = outcomes(labelled)
    assert second.keys() == compared and all(second[name] == one for name, one in first.items())
    assert f"{len(compared) - 20} outcomes (asked for 1000)" in said[-1]
    assert said[-1].endswith(f"{len(compared)} in all")


def test_fit_and_eval_write_the_same_card(labelled):
    said = []
    reward("fit", config(), labelled, said.append)
    card, page = labelled.model.with_suffix(".card.json"), labelled.model.with_suffix(".card.html")
    fitted, figures = json.loads(card.read_text()), dict(line.split() for line in said if len(line.split()) == 2)
    assert said[-1] == f"{page}: reward card written"
    assert fitted["about"]["reward.heads"] == str(tuple(HEADS))
    assert float(figures["success_threshold"]) == pytest.approx(fitted["threshold"], rel=1e-3)
    assert float(figures["success_recall"]) == pytest.approx(fitted["recall"]["rate"], abs=1e-3)
    assert float(figures["false_positives"]) == pytest.approx(fitted["false_positives"]["rate"], abs=1e-3)
    assert "negatives) is judged by the threshold of the other" in fitted["false_positives_note"]
    # A quarter of 12 demonstrations is held out, with three negatives each; there is one instruction only.
    held = {name: rate["num"] for name, rate in fitted["by_kind"].items()}
    assert set(held) == {"succeeded", "failed", "rewound", "cut", "near miss"}
    assert held["rewound"] == held["cut"] == held["near miss"] <= held["succeeded"] >= 3
    card.unlink()
    reward("eval", config(), labelled, said.append)
    again = json.loads(card.read_text())
    assert again == fitted
    shown = page.read_text()
    assert "http" not in shown and shown.count("data:image/") == 4 * len(fitted["mistakes"])
    assert all(f"{m['first']} over {m['second']}" in shown for m in fitted["mistakes"] if m["label"] > 0.5)


def test_a_fit_without_what_its_config_names_is_refused(labelled, folder, tmp_path):
    with pytest.raises(ValueError, match="names demonstrations: pass their folder as --demos"):
        reward("fit", config(), replace(labelled, demos=None), print)
    store = tmp_path / "other.sqlite"
    offline.label(config(), labelled.data, store, 40, print)
    with pytest.raises(ValueError, match=r"other.outcomes.sqlite has no outcome .* `vla-rlaif label --outcomes N`"):
        reward("fit", config(), replace(labelled, store=store), print)
    assert not labelled.model.exists()
    alone = replace(labelled, store=store)
    reward("fit", config(outcomes=["demonstrations"], fit_steps=2), alone, lambda text: None)
    assert alone.model.exists()


def test_a_folder_says_whether_the_end_of_its_demonstrations_is_seen(tmp_path):
    """Only its last frame shows the point within 0.1 of the goal, where the demonstrations end."""

    def states(episodes):
        live = np.arange(episodes.state.shape[1]) <= episodes.num_decisions[:, None]
        return EpisodeFeatures(values=episodes.state.astype(np.float32), live=live)

    env = build_env(config().env)
    for is_seen in (True, False):
        folder = tmp_path / str(is_seen)
        save_demonstrations(folder, replace(demonstrations(steps=8), is_end_seen=is_seen), {})
        clips = clips_of_folder(folder, config(), learned_settings(config()), states, env.spec)
        end = clips.values[clips.is_end & (clips.kind == KINDS.index("succeeded"))]
        far = np.linalg.norm(end[:, :2] - end[:, 2:], axis=1)
        assert len(far) == 12 and (far < 0.1).all() == is_seen


def test_demonstrations_of_another_env_are_named(labelled, tmp_path):
    demos = demonstrations()
    save_demonstrations(tmp_path / "wide", replace(demos, state=np.pad(demos.state, ((0, 0), (0, 0), (0, 3)))), {})
    with pytest.raises(ValueError, match=r"7.*4|4.*7"):
        reward("fit", config(), replace(labelled, demos=tmp_path / "wide"), print)
    save_demonstrations(tmp_path / "side", replace(demos, images={"side": demos.images["top"]}), {})
    with pytest.raises(ValueError, match=r"side.*top|top.*side"):
        reward("fit", config(), replace(labelled, demos=tmp_path / "side"), print)
    with pytest.raises(ValueError, match=r"no dataset at .*nowhere"):
        reward("fit", config(), replace(labelled, demos=tmp_path / "nowhere"), print)


def coin(episodes, pairs):
    return np.full(len(pairs), 0.9)


def test_a_labeller_that_cannot_say_outcomes_is_refused_before_it_is_asked_anything(folder, tmp_path):
    settings = config(labeller={"type": "python", "function": "test_outcomes_offline:coin"})
    store = tmp_path / "labels.sqlite"
    with pytest.raises(ValueError, match=r"compares episodes and cannot say whether one has succeeded"):
        offline.label(settings, folder / "data", store, 10, print, num_outcomes=5)
    assert not store.exists()
    with pytest.raises(ValueError, match="--outcomes is -3"):
        offline.label(config(), folder / "data", store, 10, print, num_outcomes=-3)
    assert not store.exists()
