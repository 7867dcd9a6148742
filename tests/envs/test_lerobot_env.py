"""The tabletop as LeRobot's evaluation sees it: the same start states, frames and rewards as ours."""

import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PreTrainedConfig
from lerobot.configs.parser import load_plugin
from lerobot.envs import (
    EnvConfig,
    env_to_policy_features,
    make_env,
    make_env_pre_post_processors,
    preprocess_observation,
)
from lerobot.envs.utils import NEW_ROLLOUT_OPTION
from lerobot.policies import make_policy, make_pre_post_processors
from lerobot.scripts import lerobot_eval

from vla_rlaif.build import build_policy
from vla_rlaif.config import LearnerConfig, parse_config
from vla_rlaif.envs.tabletop import Tabletop
from vla_rlaif.evaluation import chosen_starts
from vla_rlaif.evaluation_verb import Request, evaluate_policies
from vla_rlaif.grpo import GRPO
from vla_rlaif.lerobot_config import SmolVLAConfig
from vla_rlaif.rollout import make_batch, noise_seeds, rollout, take_starts, train_starts
from vla_rlaif.torch_learner import TorchLearner
from vla_rlaif.types import Starts

KIND = "vla_rlaif_tabletop"
SIZES = {"image_size": 16, "max_steps": 4, "renderer": "ray"}
FIRST_SEED, NUM_ENVS, CHUNK = 1000, 2, 2
STEPS = 2  # denoising steps


@pytest.fixture(scope="module")
def config():
    load_plugin("vla_rlaif.envs.tabletop")  # what --env.discover_packages_path does
    return EnvConfig.get_choice_class(KIND)(task="reach", **SIZES)


def test_features_are_those_that_policies_know(config):
    features = env_to_policy_features(config)
    assert {k: f.shape for k, f in features.items()} == {
        "action": (7,),
        "observation.state": (8,),
        "observation.images.primary": (3, 16, 16),
        "observation.images.wrist": (3, 16, 16),
    }
    assert features["action"].type is FeatureType.ACTION


def test_it_is_randomised_as_ours_is(config):
    strengths = {"texture": 0.5, "camera": 0.03, "mass": 0.5}
    envs: Any = type(config)(task="reach", randomize=strengths, **SIZES).create_envs(2)[KIND][0]
    ours = Tabletop("reach", num_envs=2, physics_threads=1, render_threads=1, randomize=strengths, **SIZES)
    observation, _ = envs.reset(seed=[1000, 1001])
    for camera, images in ours.reset(np.array([1000, 1001])).obs.images.items():
        np.testing.assert_array_equal(observation["pixels"][camera], images)
    envs.close()
    ours.close()


def play(envs, actions):
    observation, _ = envs.reset(seed=[1000, 1001], options={NEW_ROLLOUT_OPTION: True})
    seen, rewards, ended, infos = [preprocess_observation(observation)], [], [], []
    for action in actions:
        observation, reward, terminated, truncated, info = envs.step(action)
        seen.append(preprocess_observation(observation))
        rewards.append(reward)
        ended.append(terminated | truncated)
        infos.append(info)
    return seen, np.stack(rewards), np.stack(ended), infos


def test_it_plays_what_our_env_plays(config):
    ours = Tabletop("reach", num_envs=2, chunk=1, physics_threads=1, render_threads=1, **SIZES)
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 2, 7)).astype(np.float32)
    envs: Any = make_env(config, n_envs=2)[KIND][0]
    try:
        assert envs.call("_max_episode_steps") == (4, 4)
        seen, rewards, ended, infos = play(envs, actions)
        assert envs.call("task_description") == ("move the gripper to the green disc",) * 2
    finally:
        envs.close()
    now = ours.reset(np.array([1000, 1001]))
    for step, there in enumerate(seen):
        for camera, images in now.obs.images.items():
            expected = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
            torch.testing.assert_close(there[f"observation.images.{camera}"], expected, rtol=0, atol=0)
        np.testing.assert_array_equal(there["observation.state"].numpy(), now.obs.state)
        if step < len(actions):
            now = ours.step(actions[step][:, None])
            np.testing.assert_array_equal(rewards[step], now.success)
            np.testing.assert_array_equal(ended[step], now.done)
            np.testing.assert_array_equal(infos[step]["is_success"], now.success)
    ours.close()


def test_a_member_that_is_done_stands_still(config):
    envs = make_env(config, n_envs=2)[KIND][0]
    seen, _, ended, _ = play(envs, np.zeros((7, 2, 7), np.float32))
    envs.close()
    assert ended[3].all()
    for there in seen[5:]:
        assert torch.equal(there["observation.state"], seen[4]["observation.state"])


def tune(policy, env) -> None:
    """One optimiser phase of GRPO, on rewards out of the air."""
    starts = train_starts(0, 0, 1, NUM_ENVS)
    played = rollout(policy, env, starts, seed=0)
    batch = make_batch(played, np.array([1.0, -1.0]), float(played.mask.sum()))
    learner = TorchLearner(policy, GRPO(group_size=NUM_ENVS), LearnerConfig(lr=1e-2, epochs=2, minibatch=4))
    before = {name: value.clone() for name, value in policy.params.items()}
    learner.update(batch, 0)
    policy.load(learner.weights(), 1)
    assert any(not torch.equal(before[name], policy.params[name]) for name in policy.trainable)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(our policy, the `pretrained_model` folder that it wrote)."""
    env = Tabletop("reach", num_envs=NUM_ENVS, chunk=CHUNK, physics_threads=1, render_threads=1, **SIZES)
    policy = build_policy(SmolVLAConfig(flow_steps=STEPS), env.spec, 0)
    tune(policy, env)
    env.close()
    folder = tmp_path_factory.mktemp("policy") / "pretrained_model"
    policy.export(folder)
    return policy, folder


def test_a_tuned_policy_acts_in_lerobots_evaluation_as_in_ours(config, exported):
    """Whole episodes, action by action, bit for bit. LeRobot draws where a chain starts from a generator of its own; it
    is given ours."""
    policy, folder = exported
    seeds = np.arange(FIRST_SEED, FIRST_SEED + NUM_ENVS)
    starts = Starts(seed=seeds, group=np.arange(NUM_ENVS), member=np.zeros(NUM_ENVS, np.int64))
    env = Tabletop("reach", num_envs=NUM_ENVS, chunk=CHUNK, physics_threads=1, render_threads=1, **SIZES)
    ours = rollout(policy, env, starts, seed=0, noise_scale=0.0)
    env.close()

    settings = PreTrainedConfig.from_pretrained(folder)
    settings.pretrained_path = folder
    theirs: Any = make_policy(settings, env_cfg=config).eval()
    decisions = iter(range(SIZES["max_steps"] // CHUNK))

    def our_noise(shape: tuple[int, ...], device: object) -> torch.Tensor:
        return starting_noise(noise_seeds(0, starts, next(decisions)), shape)

    theirs.model.sample_noise = our_noise
    envs = make_env(config, n_envs=NUM_ENVS)[KIND][0]
    with torch.no_grad():
        played = lerobot_eval.rollout(
            envs,
            theirs,
            *make_env_pre_post_processors(env_cfg=config, policy_cfg=settings),
            *make_pre_post_processors(settings, pretrained_path=str(folder)),
            seeds=seeds.tolist(),
        )
    envs.close()
    live = np.repeat(ours.mask, CHUNK, axis=1)
    actions = ours.action.reshape(NUM_ENVS, -1, 7)
    np.testing.assert_array_equal(np.clip(played["action"].numpy(), -1, 1)[live], np.clip(actions, -1, 1)[live])
    assert live.all() and actions.std() > 0.01


def test_our_evaluation_agrees_with_lerobots(exported, tmp_path):
    """The same folder on the same start states, some won and some lost: success by success. LeRobot sums rewards up to
    one step after the end (its mask is `<= done_index + 1`); here that is a frozen step of reward 0, so sums agree."""
    _, folder = exported
    num, radius = 6, 0.17
    kind = EnvConfig.get_choice_class(KIND)(task="reach", success_radius=radius, **SIZES)
    run: dict[str, Any] = {
        "env": {
            "type": "tabletop",
            "num_envs": NUM_ENVS,
            "chunk": CHUNK,
            "threads": 1,
            "success_radius": radius,
            **SIZES,
        },
        "policy": {"type": "lerobot", "path": str(folder)},
        "algorithm": {"group_size": 2},
        "evaluate": {"episodes": num, "clips": 1},
    }
    asked = Request(policy=(str(folder),), first_seed=FIRST_SEED, to=tmp_path / "ours.json")
    evaluate_policies(parse_config(run, source="test"), asked, lambda text: None)
    ours = json.loads((tmp_path / "ours.json").read_text())

    settings = PreTrainedConfig.from_pretrained(folder)
    settings.pretrained_path = folder
    theirs: Any = make_policy(settings, env_cfg=kind).eval()
    starts, _ = chosen_starts(Tabletop("reach", num_envs=1, **SIZES).spec, num, FIRST_SEED)
    batches = (take_starts(starts, np.arange(first, first + NUM_ENVS)) for first in range(0, num, NUM_ENVS))
    turns = ((part, turn) for part in batches for turn in range(SIZES["max_steps"] // CHUNK))

    def our_noise(shape: tuple[int, ...], device: object) -> torch.Tensor:
        return starting_noise(noise_seeds(0, *next(turns)), shape)

    theirs.model.sample_noise = our_noise
    envs = make_env(kind, n_envs=NUM_ENVS)[KIND][0]
    info: Any = lerobot_eval.eval_policy(
        envs,
        theirs,
        *make_env_pre_post_processors(env_cfg=kind, policy_cfg=settings),
        *make_pre_post_processors(settings, pretrained_path=str(folder)),
        n_episodes=num,
        start_seed=FIRST_SEED,
    )
    envs.close()
    rows = info["per_episode"]
    assert [row["seed"] for row in rows] == ours["start_seeds"]
    assert [row["success"] for row in rows] == ours["outcomes"] and 0 < sum(ours["outcomes"]) < num
    assert info["aggregated"]["pc_success"] == pytest.approx(100 * ours["success"])
    assert [row["sum_reward"] for row in rows] == [float(won) for won in ours["outcomes"]]


def starting_noise(seeds: np.ndarray, shape: tuple[int, ...]) -> torch.Tensor:
    """Where our chains start: standard normal numbers of the row's seed, after the one that says which steps are
    stochastic."""
    rngs = [np.random.default_rng(int(s)) for s in seeds]
    drawn = [(rng.integers(0, 1), rng.standard_normal((STEPS + 1, *shape[1:]), np.float32)[0]) for rng in rngs]
    return torch.from_numpy(np.stack([x for _, x in drawn]))


def test_the_command_runs_to_its_end(exported, tmp_path, monkeypatch):
    """`lerobot-eval` as a user calls it, with its default asynchronous envs."""
    _, folder = exported
    flags = ["--policy.path", str(folder), "--policy.device=cpu", "--eval.n_episodes=2", "--eval.batch_size=2"]
    flags += [f"--env.type={KIND}", "--env.discover_packages_path=vla_rlaif.envs.tabletop", "--env.task=reach"]
    flags += [f"--env.{name}={value}" for name, value in SIZES.items()] + ["--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["lerobot-eval", *flags])
    lerobot_eval.main()
    overall = json.loads((tmp_path / "eval_info.json").read_text())["overall"]
    assert overall["n_episodes"] == 2 and 0 <= overall["pc_success"] <= 100
