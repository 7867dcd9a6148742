"""An official folder as a policy for an environment, and back: the golden tiny checkpoint, written by upstream."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from octo_folders import GOLDEN, PARAMS, copied

from vla_rlaif.policies.octo import adopt
from vla_rlaif.policies.octo.adopt import export_folder, from_folder
from vla_rlaif.policies.octo.construct import from_parts
from vla_rlaif.policies.octo.official import read_folder
from vla_rlaif.policies.octo.policy import OctoPolicy
from vla_rlaif.policy_config import OctoCheckpointConfig
from vla_rlaif.tune_config import LoraTuning
from vla_rlaif.types import EnvSpec, Observation

SOURCE = GOLDEN / "tiny_ckpt"
TEXTS = ("pick up the red cube", "close the drawer")
SEEDS = np.arange(3, dtype=np.uint32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt, "CACHE", tmp_path / "cache")


def env(**changes: Any) -> EnvSpec:
    values: dict[str, Any] = {"cameras": ("primary", "wrist"), "image_size": 32, "state_dim": 3, "action_dim": 7}
    return EnvSpec(**(values | {"chunk": 2, "max_decisions": 2, "instructions": TEXTS} | changes))


def config(**changes: Any) -> OctoCheckpointConfig:
    return OctoCheckpointConfig(**({"folder": SOURCE, "dataset": "tiny_bridge"} | changes))


def observe(spec: EnvSpec) -> Observation:
    rng = np.random.default_rng(0)
    size = (3, spec.image_size, spec.image_size, 3)
    images = {camera: rng.integers(0, 256, size, np.uint8) for camera in spec.cameras}
    return Observation(images=images, state=np.zeros((3, spec.state_dim), np.float32), instruction=(*TEXTS, TEXTS[0]))


def action(policy: OctoPolicy, spec: EnvSpec) -> np.ndarray:
    return policy.act(observe(spec), SEEDS, noise_scale=0.0).action


def stored(policy: OctoPolicy) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in policy.params.items()}


def test_a_folder_acts_is_stored_and_written_back(tmp_path: Path) -> None:
    spec = env()
    policy = from_folder(config(), spec, seed=0)
    assert policy.origin["adaptation"]["initialised"] == [] and policy.origin["adaptation"]["unused"] == []
    acted = action(policy, spec)
    assert acted.shape == (3, 2, 7)  # the first 2 of the 4 steps that the head predicts
    again = from_parts(config(), json.loads(json.dumps(policy.metadata())), stored(policy))
    np.testing.assert_array_equal(action(again, spec), acted)

    export_folder(again, tmp_path / "out", step=7)
    written, golden = read_folder(tmp_path / "out"), read_folder(SOURCE)
    assert written.step == 7 and written.spec == golden.spec
    assert written.params.keys() == PARAMS.keys()
    for name, value in PARAMS.items():
        np.testing.assert_array_equal(written.params[name], value, strict=True)
    back = from_folder(
        config(folder=tmp_path / "out", dataset=None, tokenizer=SOURCE.resolve() / "t5-tiny"), spec, seed=1
    )
    np.testing.assert_allclose(action(back, spec), acted, atol=1e-6)


def test_a_camera_that_the_env_lacks_is_left_out_and_kept_for_the_export(tmp_path: Path) -> None:
    spec = env(cameras=("primary",))
    policy = from_folder(config(cameras={"image_primary": "primary"}, tune=LoraTuning(rank=2, blocks=1)), spec, seed=0)
    wrist = {name for name in policy.params if "wrist" in name}
    assert wrist == {name for name in PARAMS if "wrist" in name} and not wrist & policy.trainable
    layout = [span.name for span in policy.network.layout.step]
    assert layout == ["obs_primary", "obs_task_language", "readout_action"]
    export_folder(policy, tmp_path / "out", step=1)
    assert read_folder(tmp_path / "out").params.keys() == PARAMS.keys()


def test_a_new_camera_starts_from_random_values_if_that_is_allowed(tmp_path: Path) -> None:
    spec = env(cameras=("primary", "side"))
    cameras = {"image_primary": "primary", "image_side": "side"}
    with pytest.raises(ValueError, match=r"Not in the checkpoint: .*side(?s:.)*allow_new="):
        from_folder(config(cameras=cameras), spec, seed=0)
    policy = from_folder(config(cameras=cameras, allow_new=("*side*",)), spec, seed=0)
    assert policy.params["octo_transformer/obs_side_pos_embedding"].shape == (1, 4, 4, 64)  # 32 pixels: 4 patches
    assert all("side" in name for name in policy.origin["adaptation"]["initialised"])
    export_folder(policy, tmp_path / "out", step=1)
    written = read_folder(tmp_path / "out")
    assert dict(written.spec.observation_tokenizers).keys() == {"primary", "wrist", "side"}
    assert written.example_batch["observation"]["image_side"].shape == (1, 1, 32, 32, 3)
    assert len(written.params) == len(PARAMS) + 21  # a stem of 18, a projection of 2, positions


def test_a_new_robot_gets_a_new_head_and_reads_its_own_state(tmp_path: Path) -> None:
    spec = env(action_dim=4, chunk=3, state_dim=5)
    policy = from_folder(config(new_head=True, proprio=True, dataset=None), spec, seed=0)
    assert policy.network.head_spec.action_horizon == 3 and policy.network.head_spec.action_dim == 4
    assert policy.network.head_spec.hidden_dim == 64  # like the old one's
    fresh = policy.origin["adaptation"]["initialised"] + [r["name"] for r in policy.origin["adaptation"]["reshaped"]]
    assert all(name.startswith("heads_action/") or "obs_proprio" in name for name in fresh)
    assert action(policy, spec).shape == (3, 3, 4)
    export_folder(policy, tmp_path / "out", step=1)
    back = from_folder(
        config(folder=tmp_path / "out", dataset=None, tokenizer=SOURCE.resolve() / "t5-tiny"), spec, seed=1
    )
    np.testing.assert_allclose(action(back, spec), action(policy, spec), atol=1e-6)


def test_fewer_dims_than_the_head_has_are_left_out(tmp_path: Path) -> None:
    """The other two are noise, as upstream; they enter neither action nor log-probability."""
    folder, five = copied("tiny_ckpt", tmp_path), env(action_dim=5)
    statistics = {"action": {"mean": [0.0] * 5, "std": [1.0] * 5}}
    (folder / "dataset_statistics.json").write_text(json.dumps(statistics))
    policy = from_folder(config(folder=folder, dataset=None), five, seed=0)
    assert policy.network.live.tolist() == [True, True, True, True, True, False, False] * 4
    decision = policy.act(observe(five), SEEDS)
    assert decision.action.shape == (3, 2, 5)
    inputs = policy.inputs(observe(five), decision.trace, np.full(3, 2))
    logp = np.asarray(policy.score(policy.params, inputs)[0])
    np.testing.assert_allclose(logp, decision.logp, atol=1e-4)
    dead = ~policy.network.live
    moved = decision.trace["chain"].copy()
    moved[:, -1, dead] += 1.0  # the last sample conditions nothing
    np.testing.assert_array_equal(policy.score(policy.params, inputs | {"chain": moved})[0], logp)


@pytest.mark.parametrize(
    ("changes", "spec", "message"),
    [
        ({"cameras": {"image_primary": "front"}}, {}, "'front'; the env has the cameras primary, wrist.*image_wrist"),
        ({"cameras": {}}, {}, "policy.cameras is empty: name at least one of .*image_primary"),
        ({"dataset": None}, {}, "2 datasets; say whose statistics to use: tiny_bridge, tiny_two_arm"),
        ({"dataset": "tiny_bridgev2"}, {}, "no dataset 'tiny_bridgev2'. Did you mean 'tiny_bridge'"),
        ({}, {"action_dim": 6}, "have 7 action dims, the env has 6.*new_head"),
        ({}, {"chunk": 5}, "action_horizon 4, the env needs 5"),
        ({"dataset": "tiny_two_arm"}, {"action_dim": 8}, "have 7 action dims, the env has 8|needs 8"),
        ({"new_head": True}, {}, "policy.dataset names statistics of old actions"),
        ({"tuned_steps": 21}, {}, "tuned_steps 21 exceeds the 20 steps"),
        ({"window": 5}, {}, "window of 5 frames; the model has positions for 4"),
        ({"step": 3}, {}, "no step 3; it has 2000"),
        ({"image_sizes": {"image_primary": 32}}, {}, "policy.image_sizes sets image_primary, but the folder says 64"),
        ({"image_sizes": {"image_side": 32}}, {}, "'image_side', which is not in policy.cameras"),
        ({"allow_new": ("*nothing*",)}, {}, "matches none"),
        ({"folder": GOLDEN}, {}, "not an official Octo folder"),
    ],
)
def test_a_misfit_is_named(changes: dict[str, Any], spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_folder(config(**changes), env(**spec), seed=0)


def test_an_unknown_sentence_is_refused() -> None:
    spec = env()
    policy = from_folder(config(), spec, seed=0)
    obs = observe(spec)
    with pytest.raises(ValueError, match=r"no language features of 'fold the towel'.*close the drawer"):
        policy.act(Observation(images=obs.images, state=obs.state, instruction=("fold the towel",) * 3), SEEDS)


def test_a_folder_without_tokenizer_says_what_to_put_where(tmp_path: Path) -> None:
    folder = copied("tiny_ckpt", tmp_path)
    (folder / "t5-tiny" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"t5-tiny holds no tokenizer.json"):
        from_folder(config(folder=folder), env(), seed=0)


def test_a_policy_from_scratch_cannot_be_exported(policy: OctoPolicy, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"made from scratch.*octo_checkpoint"):
        export_folder(policy, tmp_path / "out", step=1)
