"""A tiny SmolVLA through the whole program: demonstrations, imitation, GRPO, resume, export, LeRobot."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

from vla_rlaif.build import build_env, load_folder
from vla_rlaif.cli import main
from vla_rlaif.config import RunConfig, load_config
from vla_rlaif.metrics import read_metrics

YAML = """
name: smolvla
env: {type: tabletop, task: reach, num_envs: 8, image_size: 32, chunk: 2, max_steps: 4, renderer: ray, threads: 1}
policy:
  type: smolvla
  vlm: {type: tiny, image_size: 16, patch_size: 4, vision_dim: 16, vision_layers: 1, vision_mlp_dim: 16,
        hidden_dim: 32, num_layers: 2, mlp_dim: 32}
  flow_steps: 3
  sampler: {type: hybrid, steps: 2}
warm_start: {collect: {episodes: 4, max_steps: 5}, imitate: {steps: 4, batch: 8, samples: 2}}
reward: {type: preference, encoder: {type: policy}, budget: 24, initial_labels: 16, initial_episodes: 8,
         labels_per_refresh: 8, refresh_every: 1, fit_steps: 10}
algorithm: {type: grpo, group_size: 4, std_floor: 0.0}
learner: {epochs: 1, minibatch: 8, micro_batches: 2, devices: 1}
loop: {steps: 3, validate_every: 1, validation_episodes: 8, checkpoint_every: 1, max_refills: 0}
evaluate: {episodes: 8, clips: 1}
"""


def comparable(folder: Path) -> list[dict[str, float]]:
    timed = ("time/", "minutes", "reward/fit_s", "idle/", "sync/")
    return [
        {k: v for k, v in line.items() if not k.startswith(timed)} for line in read_metrics(folder / "metrics.jsonl")
    ]


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[RunConfig, Path, Path]:
    """(config, its file, the run directory)."""
    folder = tmp_path_factory.mktemp("smolvla")
    (folder / "run.yaml").write_text(YAML)
    assert run("train", str(folder / "run.yaml"), "--out", str(folder / "run")) == 0
    return load_config(folder / "run.yaml"), folder / "run.yaml", folder / "run"


def test_it_trains_and_keeps_its_policy(trained):
    _, _, folder = trained
    lines = read_metrics(folder / "metrics.jsonl")
    assert len(lines) == 3 and all(line["ratio_error_first"] == 0 for line in lines if line["updates"])
    assert any(line["updates"] for line in lines)
    result = json.loads((folder / "result.json").read_text())
    assert result["labels"] == 22 and result["episodes"] == 8


def test_it_resumes_bit_equal(trained, tmp_path):
    """Two steps, then the third from the checkpoint: as the three in one go."""
    _, file, folder = trained
    argv = ("train", str(file), "--out", str(tmp_path / "run"))
    assert run(*argv, "--loop.steps", "2") == 0
    assert run(*argv, "--resume") == 0
    for resumed, straight in zip(comparable(tmp_path / "run"), comparable(folder), strict=True):
        np.testing.assert_equal(resumed, straight)


def test_lerobot_acts_as_the_best_policy(trained, tmp_path):
    config, file, folder = trained
    env = build_env(config.env)
    try:
        obs = env.reset(np.arange(8)).obs
        policy = load_folder(folder / "best", config, env.spec)
    finally:
        env.close()
    seeds = np.arange(8, dtype=np.uint32)
    ours = policy.act(obs, seeds, noise_scale=0.0).action
    start = torch.from_numpy(np.stack([np.random.default_rng(s).standard_normal((2, 7), np.float32) for s in range(8)]))
    assert run("export", str(file), "--policy", str(folder / "best"), "--to", str(tmp_path / "out")) == 0
    for exported in (folder / "best" / "pretrained_model", tmp_path / "out"):
        lerobot = SmolVLAPolicy.from_pretrained(exported)
        pre, post = make_pre_post_processors(PreTrainedConfig.from_pretrained(exported), pretrained_path=str(exported))
        images = {
            f"observation.images.{c}": torch.from_numpy(v).permute(0, 3, 1, 2) / 255 for c, v in obs.images.items()
        }
        batch = pre({**images, "observation.state": torch.from_numpy(obs.state), "task": list(obs.instruction)})
        theirs = post(lerobot.predict_action_chunk(batch, noise=start)).clamp(-1, 1).numpy()
        np.testing.assert_array_equal(theirs, ours)


def test_lerobots_folder_is_tuned_again(trained, tmp_path):
    """What came out goes in: policy.type lerobot on the exported folder, with other settings."""
    _, _, folder = trained
    text = (
        YAML[: YAML.index("policy:")]
        + f"""
policy: {{type: lerobot, path: {folder / "best" / "pretrained_model"}, tune: {{type: lora, rank: 2}}, fold: 1}}
reward: {{type: success}}
algorithm: {{group_size: 4}}
learner: {{minibatch: 8, devices: 1}}
loop: {{steps: 1, validate_every: 1, validation_episodes: 8}}
evaluate: {{episodes: 8, clips: 0}}
"""
    )
    (tmp_path / "run.yaml").write_text(text)
    assert run("train", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "run")) == 0
    before = json.loads((folder / "result.json").read_text())["success_after"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["success_before"] == before
    names = (tmp_path / "run" / "best" / "pretrained_model" / "config.json").read_text()
    assert '"type": "smolvla"' in names
