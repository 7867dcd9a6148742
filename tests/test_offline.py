"""Labelling and reward fitting on episodes on disk: what is asked, held out, measured and refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from safetensors.numpy import save_file

from vla_rlaif import offline
from vla_rlaif.build import build_env, build_policy
from vla_rlaif.config import parse_config
from vla_rlaif.dataset import append_episodes
from vla_rlaif.preferences.data import kendall_tau
from vla_rlaif.preferences.labelled import gather_episodes
from vla_rlaif.preferences.store import PreferenceStore
from vla_rlaif.reward_verb import Files, reward
from vla_rlaif.rollout import rollout, train_starts

DATA = {
    "env": {"type": "point_reach", "num_envs": 16},
    "policy": {"type": "gaussian", "backend": "torch"},
    "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2},
    "reward": {"type": "preference", "encoder": {"type": "cnn"}, "members": 2, "hidden": [16], "fit_steps": 40},
}


def config(**reward):
    return parse_config({**DATA, "reward": DATA["reward"] | reward}, source="test")


def play(folder, first_group, num_groups=8):
    """A shard of a policy that wanders: two of ten episodes succeed or so."""
    c = config()
    env = build_env(c.env)
    starts = train_starts(0, 0, first_group + num_groups, 4)
    starts = type(starts)(**{name: value[4 * first_group :] for name, value in vars(starts).items()})
    append_episodes(folder, rollout(build_policy(c.policy, env.spec, 0), env, starts, seed=0), {})


@pytest.fixture
def data(tmp_path):
    play(tmp_path / "data", 0)
    return tmp_path / "data"


@pytest.fixture
def store(tmp_path):
    return tmp_path / "labels.sqlite"


def label(data, store, pairs, **reward):
    said = []
    offline.label(config(**reward), data, store, pairs, said.append)
    return said


def records(store):
    with PreferenceStore(store) as kept:
        return kept.records()


def test_pairs_are_new_each_time_and_episodes_keep_their_side(data, store):
    said = label(data, store, 60)
    assert said[0].startswith(f"{store}: 60 labels (asked for 60)") and said[0].endswith("60 in all")
    label(data, store, 60)
    play(data, 8)  # a second shard with other start states
    label(data, store, 100)
    found = records(store)
    pairs = [frozenset((r.first, r.second)) for r in found]
    assert len(set(pairs)) == len(pairs) == 220
    held = {i for r in found if r.held_out for i in (r.first, r.second)}
    trained = {i for r in found if not r.held_out for i in (r.first, r.second)}
    assert held and not held & trained
    assert any(i.startswith("1:") for i in held) and any(i.startswith("1:") for i in trained)
    ids, episodes = gather_episodes(data)
    group = dict(zip(ids, episodes.starts.group.tolist(), strict=True))
    assert not {group[i] for i in held} & {group[i] for i in trained}
    inside = np.mean([group[r.first] == group[r.second] for r in found[:60]])
    assert inside >= 0.4  # half of the pairs that are trained on, and what comes by chance


def test_labels_are_the_oracles(data, store):
    label(data, store, 80, labeller={"type": "oracle", "equal_threshold": 0.3, "skip_threshold": 0.2})
    ids, episodes = gather_episodes(data)
    truth = dict(zip(ids, episodes.truth.tolist(), strict=True))
    success = dict(zip(ids, episodes.success.tolist(), strict=True))
    kinds = set()
    for r in records(store):
        a, b = truth[r.first], truth[r.second]
        tie = abs(a - b) < 0.3 or (success[r.first] and success[r.second])
        expected = None if max(a, b) < 0.2 else 0.5 if tie else float(a > b)
        assert r.p_first == expected
        kinds.add(expected)
    assert kinds == {None, 0.0, 0.5, 1.0}


def test_agreement_of_labellers_on_the_same_pairs(data, store):
    said = label(data, store, 60, labeller={"type": "oracle", "equal_threshold": 0.0, "successes_tie": False})
    assert "60 labels, 0.0% ties" in said[1]
    config_b = config(labeller={"type": "oracle", "equal_threshold": 0.3, "successes_tie": False})
    said = []
    offline.label(config_b, data, store, 40, said.append, again=True)
    first, second = records(store)[:60], records(store)[60:]
    sides = {frozenset((r.first, r.second)): r.held_out for r in first}
    assert len({frozenset((r.first, r.second)) for r in second}) == 40
    assert all(sides[frozenset((r.first, r.second))] == r.held_out for r in second)
    (shared,) = json.loads(store.with_suffix(".agreement.json").read_text())["pairs"]
    ties = sum(r.is_tie for r in second)
    assert 0 < ties < 40 and (shared["num"], shared["raw"]) == (40, 1 - ties / 40)
    assert any(f"40 pairs in common, Cohen's kappa {shared['kappa']:.3f}" in line for line in said)
    offline.label(config_b, data, store, 40, said.append, again=True)
    with pytest.raises(ValueError, match="has no pair that others have labelled and oracle/1"):
        offline.label(config_b, data, store, 40, said.append, again=True)


def by_x(episodes, pairs):
    """A user's labeller: whose point ends farther right, sure of it in 9 of 10 cases."""
    x = episodes.state[:, -1, 0]
    return np.where(x[pairs[:, 0]] > x[pairs[:, 1]], 0.9, 0.1)


def lump(episodes, pairs):
    return 0.5


def test_labels_of_the_users_own_function(data, store):
    label(data, store, 30, labeller={"type": "python", "function": "test_offline:by_x"})
    ids, episodes = gather_episodes(data)
    x = dict(zip(ids, episodes.state[:, -1, 0].tolist(), strict=True))
    assert [r.p_first for r in records(store)] == [0.9 if x[r.first] > x[r.second] else 0.1 for r in records(store)]
    assert {r.labeller for r in records(store)} == {"python/1(test_offline:by_x)"}
    with pytest.raises(ValueError, match=r"the module 'test_offline' has no 'nothing'"):
        label(data, store, 5, labeller={"type": "python", "function": "test_offline:nothing"})
    with pytest.raises(ValueError, match=r"'test_offline:lump' returned shape \(\) of float64 for 5 pairs"):
        label(data, store, 5, labeller={"type": "python", "function": "test_offline:lump"})


def test_equal_start_states_are_one_group_whatever_the_shards_call_them(data):
    play(data, 0)
    _, episodes = gather_episodes(data)
    assert len(np.unique(episodes.starts.group)) == 8
    assert (np.bincount(episodes.starts.group) == 8).all()


def test_labelling_everything_says_when_nothing_is_left(tmp_path, store):
    play(tmp_path / "few", 0, num_groups=2)
    # Two groups of 4, one held out: 6 pairs on either side, and none across.
    assert "12 labels (asked for 50)" in label(tmp_path / "few", store, 50)[0]
    with pytest.raises(ValueError, match="has every pair of the 8 episodes"):
        label(tmp_path / "few", store, 1)


def test_fit_then_eval(data, store, tmp_path):
    label(data, store, 200)
    model, said = tmp_path / "sub" / "reward.safetensors", []
    reward("fit", config(), Files(data=data, store=store, model=model), said.append)
    fitted = dict(line.split() for line in said if len(line.split()) == 2)
    reward("eval", config(), Files(data=data, store=store, model=model), said.append)
    figures = json.loads((tmp_path / "sub" / "reward.json").read_text())
    assert figures["held_out_accuracy"] == pytest.approx(float(fitted["held_out_accuracy"]), abs=1e-3)
    assert figures["ece"] == pytest.approx(float(fitted["ece"]), abs=1e-3)
    assert float(fitted["train_accuracy"]) > 0.7 and figures["kendall_tau"] > 0.3
    assert figures["success_failure_gap"] > 0
    assert (figures["num_pairs"], figures["num_episodes"]) == (200, 32)
    assert float(fitted["num_pairs"]) + figures["num_held_out_pairs"] == 200
    written = ["reward.card.html", "reward.card.json", "reward.json", "reward.safetensors"]
    assert sorted(p.name for p in model.parent.iterdir()) == written


@pytest.fixture
def fitted(data, store, tmp_path):
    label(data, store, 60)
    reward(
        "fit", config(fit_steps=2), Files(data=data, store=store, model=tmp_path / "m.safetensors"), lambda text: None
    )
    return tmp_path / "m.safetensors"


def evaluate(data, store, model, **changed):
    reward("eval", config(**changed), Files(data=data, store=store, model=model), lambda text: None)


def test_a_model_is_read_as_it_was_fitted(data, store, fitted, tmp_path):
    with pytest.raises(ValueError, match=r"fitted with reward.hidden \(16,\), not \(8,\)"):
        evaluate(data, store, fitted, hidden=[8])
    with pytest.raises(ValueError, match=r"fitted with reward.members 2, not 3"):
        evaluate(data, store, fitted, members=3)
    with pytest.raises(ValueError, match=r"no reward model at .*none"):
        evaluate(data, store, tmp_path / "none")
    foreign = tmp_path / "foreign.safetensors"
    save_file({"a": np.zeros(2)}, foreign)
    with pytest.raises(ValueError, match="is not a reward model of this version"):
        evaluate(data, store, foreign)
    fitted.write_bytes(fitted.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"m.safetensors is damaged"):
        evaluate(data, store, fitted)


def test_another_encoder_width_is_named(data, store, fitted):
    """The same env with other instructions, say: the settings agree, the features do not."""
    from safetensors import safe_open

    with safe_open(fitted, "numpy") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["scale/feature_mean"] = tensors["scale/feature_mean"][:-1].copy()
    save_file(tensors, fitted, metadata=metadata)
    with pytest.raises(ValueError, match="features, but its encoder now gives"):
        evaluate(data, store, fitted)


def test_a_store_of_other_episodes_is_named(data, store, tmp_path):
    play(data, 8)
    label(data, store, 300)
    play(tmp_path / "other", 0)
    with pytest.raises(ValueError, match=r"labels of \d+ episodes that .*other does not hold, the first is '1:"):
        reward("fit", config(), Files(data=tmp_path / "other", store=store, model=tmp_path / "m"), print)
    with pytest.raises(ValueError, match="does not hold"):
        label(tmp_path / "other", store, 10)


def test_an_empty_or_missing_store_is_named(data, store, tmp_path):
    with pytest.raises(ValueError, match=r"no preference store at .*labels.sqlite; `vla-rlaif label` makes one"):
        reward("fit", config(), Files(data=data, store=store, model=tmp_path / "m"), print)
    assert not store.exists()
    label(data, store, 20, labeller={"type": "oracle", "skip_threshold": 5.0})  # skips every pair
    with pytest.raises(ValueError, match=r"has no labels \(20 skips\)"):
        reward("fit", config(), Files(data=data, store=store, model=tmp_path / "m"), print)


def test_wrong_uses_are_named(data, store):
    other = config().model_copy(update={"reward": parse_config({"reward": {"type": "success"}}, source="t").reward})
    with pytest.raises(ValueError, match=r"the config has reward.type success"):
        offline.label(other, data, store, 10, print)
    with pytest.raises(ValueError, match="--pairs is 0"):
        offline.label(config(), data, store, 0, print)


def test_shards_of_different_envs_are_not_mixed(data, store):
    _, episodes = gather_episodes(data)
    append_episodes(data, replace(episodes, state=episodes.state[..., :3]), {})
    with pytest.raises(ValueError, match="shard 1 was collected in another env than shard 0"):
        label(data, store, 10)


def test_episodes_of_another_env_are_named(tmp_path, data, store):
    label(data, store, 20)
    bigger = {**DATA, "env": {"type": "tabletop", "num_envs": 4, "image_size": 32, "renderer": "ray"}, "policy": {}}
    bigger |= {"policy": {"type": "octo"}, "algorithm": {"group_size": 4}}
    with pytest.raises(ValueError, match="Use the config that collected them"):
        reward("fit", parse_config(bigger, source="test"), Files(data=data, store=store, model=tmp_path / "m"), print)


@pytest.mark.parametrize("seed", range(3))
def test_kendall_tau_is_scipys(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 6, 40).astype(float), rng.normal(size=40)
    b += a
    assert kendall_tau(a, b) == pytest.approx(scipy.stats.kendalltau(a, b).statistic)
    assert kendall_tau(np.append(a, np.nan), np.append(b, 9.0)) == pytest.approx(kendall_tau(a, b))


def test_kendall_tau_by_hand():
    # Pairs: (1,2) and (1,3) agree, (2,3) disagrees: (2 - 1) / 3.
    assert kendall_tau(np.array([1.0, 2, 3]), np.array([1.0, 3, 2])) == pytest.approx(1 / 3)
    assert np.isnan(kendall_tau(np.ones(3), np.arange(3.0)))
