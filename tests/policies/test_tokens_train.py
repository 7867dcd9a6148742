"""The whole loop with a token policy: demonstrations, imitation, GRPO, checkpoints, evaluation; on point_reach."""

import json
from pathlib import Path

import numpy as np
from token_policies import make_config, make_obs, make_spec, take

from vla_rlaif.build import load_folder
from vla_rlaif.config import LearnerConfig, RunConfig
from vla_rlaif.dataset import Demonstrations, save_demonstrations
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.grpo import GRPO
from vla_rlaif.offline import export
from vla_rlaif.policies.tokens.construct import build
from vla_rlaif.rollout import Split, start_seed
from vla_rlaif.run import align
from vla_rlaif.torch_learner import TorchLearner
from vla_rlaif.tune_config import LoraTuning
from vla_rlaif.types import Batch

STRIDE = 0.25  # what a unit action moves in point_reach


def demonstrations(num: int = 64, length: int = 6) -> Demonstrations:
    """Straight to the goal, at full speed in each dim, then staying there."""
    env = PointReach(num, max_decisions=length, radius=1e-3)
    now = env.reset(np.array([start_seed(Split.DEMONSTRATION, 0, i) for i in range(num)]))
    obs, actions = [], []
    for _ in range(length):
        position, goal = now.obs.state[:, :2], now.obs.state[:, 2:]
        action = np.clip((goal - position) / STRIDE, -1, 1).astype(np.float32)
        obs.append(now.obs)
        actions.append(action)
        now = env.step(action[:, None])
    return Demonstrations(
        images={"top": np.stack([o.images["top"] for o in obs], axis=1)},
        state=np.stack([o.state for o in obs], axis=1),
        instruction=obs[0].instruction,
        action=np.stack(actions, axis=1),
        mask=np.ones((num, length), bool),
        success=now.success,
    )


def run_config(folder: Path, **policy: object) -> RunConfig:
    """Demonstrations in ``folder``, and a run on them."""
    save_demonstrations(folder / "data", demonstrations(), {})
    config = {
        "out": folder / "run",
        "env": {"type": "point_reach", "num_envs": 32, "max_decisions": 4, "radius": 0.3},
        "policy": {
            "type": "token_vla",
            "vlm": {"type": "tiny", "hidden_dim": 32, "mlp_dim": 64, "vision_dim": 16},
            "prompt": "{images}{instruction} {state}:",
            "bins": "quantile",
            **policy,
        },
        "warm_start": {"data": folder / "data", "imitate": {"steps": 80, "batch": 64, "lr": 3e-3, "samples": 1}},
        "reward": {"type": "pixel_distance"},
        "algorithm": {"group_size": 8, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.01},
        "learner": {"lr": 1e-3, "epochs": 1, "minibatch": 64},
        "loop": {"steps": 2, "validate_every": 1, "validation_episodes": 32, "checkpoint_every": 1},
        "evaluate": {"episodes": 32, "clips": 1},
    }
    return RunConfig.model_validate(config)


def check_run(run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["updates"] > 0 and line["ratio_error_first"] == 0.0 and line["grad_norm"] > 0
    assert 0 < lines[0]["reference_kl"] < lines[1]["reference_kl"]
    result = json.loads((run_dir / "result.json").read_text())
    assert result["success_before"] > 0.05  # imitation taught something: random bins reach about 2 in 100


def test_trains_end_to_end(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    align(config, resume=False, overwrite=False, say=lambda text: None)
    check_run(tmp_path / "run")
    tuned = config.policy.model_copy(update={"tune": LoraTuning(rank=2)})  # a later run may tune otherwise
    env = PointReach(2)
    policy = load_folder(tmp_path / "run" / "best", config.model_copy(update={"policy": tuned}), env.spec)
    assert policy.act(env.reset(np.arange(2)).obs, np.arange(2, dtype=np.uint32)).action.shape == (2, 1, 2)
    export(config, tmp_path / "run" / "best", tmp_path / "exported", 0, lambda text: None)
    assert (tmp_path / "exported" / "dataset_statistics.json").exists()


def test_grpo_raises_a_reward() -> None:
    """One prompt, groups of 16, the reward is the mean of the chunk: from random bins (0) to large ones."""
    policy = build(make_config(), make_spec(), seed=0)
    algorithm = GRPO(group_size=16, clip_low=0.2, clip_high=0.28)
    learner = TorchLearner(policy, algorithm, LearnerConfig(lr=5e-3, epochs=2, minibatch=64, target_kl=None))
    obs, group, means = take(make_obs(), [0] * 64), np.repeat(np.arange(4), 16), []
    for step in range(10):
        decision = policy.act(obs, np.arange(64 * step, 64 * (step + 1), dtype=np.uint32))
        reward = decision.action.mean(axis=(1, 2))
        means.append(float(reward.mean()))
        advantage = algorithm.advantages(reward, group)[0].astype(np.float32)
        ones = np.ones(64, bool)
        executed = np.full(64, 3)
        learner.update(
            Batch(obs=obs, trace=decision.trace, executed=executed, advantage=advantage, mask=ones, num_valid=64.0),
            seed=step,
        )
        policy.load(learner.weights(), learner.version)
    assert abs(means[0]) < 0.1 and means[-1] > 0.2  # the mean of 64 random chunks is 0 +- 0.03
