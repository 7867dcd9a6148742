"""A whole run that is anchored to demonstrations: they are kept, used in every update, and there again on resume."""

import shutil
from pathlib import Path

import numpy as np

from vla_rlaif.build import build_env, build_parts
from vla_rlaif.checkpoint import RunCheckpoints
from vla_rlaif.config import RunConfig
from vla_rlaif.dataset import Demonstrations, save_demonstrations
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.start import start_policy
from vla_rlaif.train import train

NUM, LENGTH = 8, 4


def demonstrations() -> Demonstrations:
    """One step of a unit action moves the point 0.25."""
    env = PointReach(NUM, max_decisions=LENGTH, radius=1e-3)
    now, obs, actions = env.reset(np.arange(NUM)), [], []
    for _ in range(LENGTH):
        obs.append(now.obs)
        actions.append(np.clip((now.obs.state[:, 2:] - now.obs.state[:, :2]) / 0.25, -1, 1))
        now = env.step(actions[-1][:, None])
    return Demonstrations(
        images={"top": np.stack([o.images["top"] for o in obs], axis=1)},
        state=np.stack([o.state for o in obs], axis=1),
        instruction=obs[0].instruction,
        action=np.stack(actions, axis=1).astype(np.float32),
        mask=np.ones((NUM, LENGTH), bool),
        success=now.success,
    )


def run(out: Path, data: Path, *, until: int, resume: bool = False) -> dict[str, np.ndarray]:
    """The tensors of the checkpoint after ``until`` steps."""
    config = {
        "out": out,
        "env": {"type": "point_reach", "num_envs": 8, "max_decisions": 2},
        "policy": {
            "type": "token_vla",
            "vlm": {"type": "tiny", "hidden_dim": 16, "mlp_dim": 16, "vision_dim": 16},
            "prompt": "{images}{instruction} {state}:",
        },
        "warm_start": {"data": data, "imitate": {"steps": 2, "batch": 8, "samples": 1}},
        "reward": {"type": "pixel_distance"},
        "algorithm": {
            **{"group_size": 4, "clip_low": 0.2, "clip_high": 0.2, "std_floor": 0.0},
            **{"anchor_coef": 0.5, "anchor_batch": 4},
        },
        "learner": {"lr": 1e-3, "epochs": 2, "minibatch": 8, "micro_batches": 2},
        "loop": {"steps": 3, "validate_every": 9, "checkpoint_every": 1},
    }
    parsed = RunConfig.model_validate(config)
    env = build_env(parsed.env)
    policy = start_policy(parsed, env, out, lambda text: None)
    with MetricsLog(out) as log:
        parts = build_parts(parsed, env, policy, out)
        train(parsed, parts, log, out, resume=resume, say=lambda text: None, until=until)
    return RunCheckpoints(out / "checkpoints", 2).load_latest()[1]


def test_an_anchored_run_resumes_bit_equal_without_its_dataset(tmp_path):
    save_demonstrations(tmp_path / "data", demonstrations(), {})
    straight = run(tmp_path / "straight", tmp_path / "data", until=2)
    run(tmp_path / "halves", tmp_path / "data", until=1)
    shutil.move(tmp_path / "data", tmp_path / "elsewhere")
    resumed = run(tmp_path / "halves", tmp_path / "data", until=2, resume=True)
    assert straight.keys() == resumed.keys()
    for name, value in straight.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("straight", "halves")]
    losses = [[line["anchor_loss"] for line in each] for each in lines]
    assert losses[0] == losses[1] and len(losses[0]) == 2 and min(losses[0]) > 0
