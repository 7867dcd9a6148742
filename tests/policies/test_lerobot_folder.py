"""`pretrained_model` folders: to LeRobot and back, and all the ways in which one can be wrong."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot_tiny import (
    KINDS,
    VLM,
    make_gemma,
    make_obs,
    make_smolvla,
    make_spec,
    make_statistics,
    small_gemma,
    smolvla_config,
    write_gemma,
)
from safetensors.numpy import load_file, save_file
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

from vla_rlaif.build import demonstrated
from vla_rlaif.dataset import Demonstrations
from vla_rlaif.lerobot_config import AdapterTuning, HybridSampler, LeRobotConfig, NoiseSampler
from vla_rlaif.policies.lerobot import construct
from vla_rlaif.policies.lerobot.policy import LeRobotPolicy
from vla_rlaif.policies.lerobot.processors import measured
from vla_rlaif.policies.lerobot.tiny_vlm import byte_tokenizer, vlm_files

SEEDS = np.arange(4, dtype=np.uint32)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """One folder of each kind."""
    root = tmp_path_factory.mktemp("folders")
    make_smolvla().export(root / "smolvla")
    for kind in ("pi0", "pi05"):
        make_gemma(root, kind)
    return root


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A SmolVLA's, to be damaged."""
    shutil.copytree(made / "smolvla", tmp_path / "it")
    return tmp_path / "it"


def load(folder: Path, **settings: Any) -> LeRobotPolicy:
    return construct.from_folder(LeRobotConfig(path=str(folder), **settings), make_spec(), seed=0)


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def lerobot_chunk(folder: Path, obs, noise: torch.Tensor, tokenizer: Path | None) -> np.ndarray:
    """What LeRobot does with a folder, from nothing but the folder."""
    with small_gemma():
        config = PreTrainedConfig.from_pretrained(folder)
        policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    overrides = {} if tokenizer is None else {"tokenizer_processor": {"tokenizer_name": str(tokenizer)}}
    pre, post = make_pre_post_processors(config, pretrained_path=str(folder), preprocessor_overrides=overrides)
    images = {
        f"observation.images.{camera}": torch.from_numpy(v).permute(0, 3, 1, 2).float() / 255
        for camera, v in obs.images.items()
    }
    batch = pre({**images, "observation.state": torch.from_numpy(obs.state), "task": list(obs.instruction)})
    return np.clip(post(policy.predict_action_chunk(batch, noise=noise)).numpy(), -1, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tune", ["plain", "lora"])
def test_lerobot_acts_alike_with_an_exported_folder(kind, tune, made, tmp_path, capsys):
    settings = {"tune": AdapterTuning(rank=2)} if tune == "lora" else {}
    settings |= {"sampler": NoiseSampler()}
    policy = make_smolvla(**settings) if kind == "smolvla" else make_gemma(made, kind, **settings)
    rng = np.random.default_rng(0)
    moved = {k: v.numpy() + 0.02 * rng.normal(size=v.shape).astype(np.float32) for k, v in policy.params.items()}
    policy.load(moved, 1)
    obs = make_obs(4)
    ours = policy.act(obs, SEEDS, noise_scale=0.0).action
    policy.export(tmp_path / "out")
    _, start, _ = policy._draw(SEEDS)
    theirs = lerobot_chunk(tmp_path / "out", obs, start, None if kind == "smolvla" else made / "tokenizer")
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=0 if tune == "plain" else 1e-5)
    assert "Could not load" not in capsys.readouterr().out
    with small_gemma():
        tokenizer = None if kind == "smolvla" else made / "tokenizer"
        again = load(tmp_path / "out", tokenizer=tokenizer)
    np.testing.assert_allclose(again.act(obs, SEEDS, noise_scale=0.0).action, ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_policy_comes_back(kind, made):
    policy = make_smolvla() if kind == "smolvla" else make_gemma(made, kind)
    metadata = json.loads(json.dumps(policy.metadata()))
    weights = {k: v.numpy() for k, v in policy.params.items()}
    with small_gemma():
        again = construct.from_parts(policy.config, metadata, weights)
    obs = make_obs(4)
    np.testing.assert_array_equal(again.act(obs, SEEDS).action, policy.act(obs, SEEDS).action)
    assert json.loads(json.dumps(again.metadata())) == metadata


def test_a_stored_policy_takes_other_settings():
    """Adapters are merged where they are not wanted any more; a policy without them gets fresh ones."""
    policy, obs = make_smolvla(tune=AdapterTuning(rank=2)), make_obs(4)
    rng = np.random.default_rng(0)
    policy.load(
        {k: v.numpy() + 0.05 * rng.normal(size=v.shape).astype(np.float32) for k, v in policy.params.items()}, 1
    )
    weights = {k: v.numpy() for k, v in policy.params.items()}
    action = policy.act(obs, SEEDS, noise_scale=0.0).action
    for settings in ({}, {"tune": AdapterTuning(rank=3)}, {"tune": AdapterTuning(rank=2), "sampler": HybridSampler()}):
        other = construct.from_parts(smolvla_config(**settings), policy.metadata(), weights)
        np.testing.assert_allclose(other.act(obs, SEEDS, noise_scale=0.0).action, action, atol=1e-5)
    with pytest.raises(ValueError, match="flow_steps is 7, but the stored policy has 4"):
        construct.from_parts(smolvla_config(flow_steps=7), policy.metadata(), weights)


def test_statistics_are_in_the_actions(made):
    """Twice the std about the same mean: twice the distance from it, where nothing is clipped."""
    stats = make_statistics()
    wide = {**stats, "action": {**stats["action"], "std": [2 * v for v in stats["action"]["std"]]}}
    mean = np.array(stats["action"]["mean"])
    narrow = {**stats, "action": {**stats["action"], "std": [0.05, 0.05]}}
    wide["action"]["std"] = [0.1, 0.1]
    actions = []
    for part in (narrow, wide):
        policy = construct.from_scratch(smolvla_config(), make_spec(), seed=0, statistics=part)
        actions.append(policy.act(make_obs(4), SEEDS, noise_scale=0.0).action - mean)
    np.testing.assert_allclose(actions[1], 2 * actions[0], atol=1e-5)


def test_demonstrations_are_measured_in_every_form():
    rng = np.random.default_rng(0)
    action = rng.uniform(-1, 1, (5000, 2)).astype(np.float32)
    action[:, 1] = 0.25  # never moves
    stats = measured(action, rng.normal(size=(50, 3)).astype(np.float32))["action"]
    np.testing.assert_allclose([stats["q01"][0], stats["q99"][0]], [-0.98, 0.98], atol=0.01)
    np.testing.assert_allclose([stats["q10"][0], stats["q90"][0]], [-0.8, 0.8], atol=0.03)
    np.testing.assert_allclose(stats["std"], [3**-0.5, 0.1], atol=0.01)
    np.testing.assert_allclose([stats["min"][1], stats["max"][1]], [0.2, 0.3], atol=1e-6)


def test_a_range_of_action_units(folder):
    """The folder speaks of pixels: 0 is the env's -1 and 512 its 1, so the middle of the range is the env's 0."""
    stats = make_statistics()
    stats["action"] |= {"mean": [256.0, 256.0], "std": [100.0, 100.0]}
    description = construct.Description.read(folder).with_statistics(stats)
    description.write(folder, final=folder)
    same = load(folder)
    plain = same._sample(same._shared_condition(same.imitation_inputs(make_obs(4))), SEEDS, 0.0)[0]
    policy = load(folder, action_low=(0, 0), action_high=(512, 512))
    action = policy.act(make_obs(4), SEEDS, noise_scale=0.0).action
    expected = np.clip((plain[:, :, :2].detach().numpy() * 100 + 256) / 256 - 1, -1, 1)
    np.testing.assert_allclose(action, expected, atol=1e-5)
    back = policy.processors.normalise_action(torch.from_numpy(action))
    inside = np.abs(action) < 1
    np.testing.assert_allclose(back.numpy()[inside], plain[:, :, :2].detach().numpy()[inside], atol=1e-4)


def test_cameras_by_mapping(folder):
    spec = make_spec(cameras=("front", "wrist"))
    obs = make_obs(4)
    config = LeRobotConfig(
        path=str(folder), cameras={"observation.images.primary": "front", "observation.images.wrist": "wrist"}
    )
    renamed = construct.from_folder(config, spec, seed=0)
    obs = replace(obs, images={**obs.images, "front": obs.images["primary"]})
    np.testing.assert_array_equal(
        renamed.act(obs, SEEDS, noise_scale=0.0).action, load(folder).act(obs, SEEDS, noise_scale=0.0).action
    )


@pytest.mark.parametrize(
    ("settings", "cameras", "message"),
    [
        (
            {},
            ("front", "wrist"),
            r"no camera of the env feeds observation\.images\.primary.*reads.*the env has front, wrist",
        ),
        ({"cameras": {"observation.images.top": "wrist"}}, ("wrist",), "does not read.*primary.*env has wrist"),
        ({"cameras": {"observation.images.wrist": "hand"}}, ("wrist",), "'hand', which the env does not have"),
        ({"absent_cameras": ("observation.images.top",)}, ("wrist",), "absent_cameras names"),
    ],
)
def test_cameras_without_a_partner(settings, cameras, message, folder):
    with pytest.raises(ValueError, match=message):
        construct.from_folder(LeRobotConfig(path=str(folder), **settings), make_spec(cameras=cameras), seed=0)


def test_a_camera_may_be_absent(made):
    one = {"cameras": {"observation.images.wrist": "wrist"}, "absent_cameras": ("observation.images.primary",)}
    policy = make_gemma(made, "pi0", **one)
    both = make_gemma(made, "pi0")
    actions = [p.act(make_obs(4), SEEDS, noise_scale=0.0).action for p in (policy, both)]
    assert np.abs(actions[0] - actions[1]).max() > 1e-4


def _statistics_of(folder: Path, edit) -> None:
    for path in folder.glob("*normalizer_processor.safetensors"):
        save_file(edit(load_file(path)), path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda s: {k: v for k, v in s.items() if not k.startswith("action")},
            r"normalise action by MEAN_STD, but have",
        ),
        (lambda s: {k: v for k, v in s.items() if k != "action.std"}, "needs mean and std"),
        (
            lambda s: {k.replace("action.", "actions."): v for k, v in s.items()},
            "statistics of actions, observation.state",
        ),
        (lambda s: {**s, "observation.state.std": np.zeros(3, np.float32)}, r"no spread.*\[0, 1, 2\]"),
        (lambda s: {**s, "action.std": np.array([0.1, np.nan], np.float32)}, r"no spread.*\[1\]"),
        (lambda s: {**s, "action.mean": np.zeros(7, np.float32)}, "have 7 numbers, the policy's action has 2"),
    ],
)
def test_statistics_that_would_be_wrong_in_silence(damage, message, folder):
    _statistics_of(folder, damage)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_statistics_of_a_dataset_replace_the_folders(folder, tmp_path):
    _statistics_of(folder, lambda s: {**s, "action.std": np.zeros(2, np.float32)})
    (tmp_path / "stats.json").write_text(json.dumps(make_statistics()))
    assert load(folder, statistics=tmp_path / "stats.json").act(make_obs(1), SEEDS[:1]).action.shape == (1, 3, 2)
    with pytest.raises(ValueError, match="cannot be read"):
        load(folder, statistics=tmp_path / "nothing.json")


def test_weights_are_taken_whole_or_not_at_all(folder):
    path = folder / "model.safetensors"
    good = load_file(path)
    name = "model.action_out_proj.weight"
    for bad, message in (
        ({k: v for k, v in good.items() if k != name}, "lacks 1 tensors .*action_out_proj"),
        ({**good, "model.extra": np.zeros(1, np.float32)}, "has beyond the policy 1 tensors .*model.extra"),
        ({**good, name: good[name][:, :-1].copy()}, "of another shape 1 tensors"),
    ):
        save_file(bad, path)
        with pytest.raises(ValueError, match=message):
            load(folder)
    save_file({k.removeprefix("model."): v for k, v in good.items()}, path)  # openpi's names
    load(folder)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged or incomplete"):
        load(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load(folder)


def test_folders_that_are_something_else(folder, tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        load(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load(tmp_path / "empty")
    change(folder / "config.json", type="vqbet")
    with pytest.raises(ValueError, match=r"type 'vqbet'; those that can be tuned here are .*smolvla"):
        load(folder)
    change(
        folder / "config.json", type="smolvla", input_features={"observation.state": {"type": "STATE", "shape": [7]}}
    )
    with pytest.raises(ValueError, match="no camera of the env feeds the policy"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load(folder)


def test_sizes_that_are_not_the_envs(folder):
    with pytest.raises(
        ValueError, match=r"state of 3 dims, the env's has 8; action of 2 dims.*7; chunks of 3 actions.*5"
    ):
        construct.from_folder(LeRobotConfig(path=str(folder)), make_spec(state_dim=8, action_dim=7, chunk=5), seed=0)


def test_a_model_that_pads_takes_other_sizes(folder):
    """Two dims become three and four of state: the weights are the folder's, the statistics new."""
    spec = make_spec(state_dim=4, action_dim=3)
    rng = np.random.default_rng(0)
    stats = measured(rng.normal(size=(40, 3)).astype(np.float32), rng.normal(size=(40, 4)).astype(np.float32))
    config = LeRobotConfig(path=str(folder), adapt=True)
    policy = construct.from_folder(config, spec, seed=0, statistics=stats)
    obs = replace(make_obs(4), state=rng.normal(size=(4, 4)).astype(np.float32))
    assert policy.act(obs, SEEDS).action.shape == (4, 3, 3)
    np.testing.assert_array_equal(
        policy.params["policy.model.action_out_proj.weight"].numpy(),
        load_file(folder / "model.safetensors")["model.action_out_proj.weight"],
    )
    policy.export(folder / "out")
    again = construct.from_folder(LeRobotConfig(path=str(folder / "out")), spec, seed=0)
    np.testing.assert_array_equal(again.act(obs, SEEDS).action, policy.act(obs, SEEDS).action)
    with pytest.raises(ValueError, match="makes the folder's statistics those of other numbers"):
        construct.from_folder(config, spec, seed=0)
    with pytest.raises(ValueError, match="max_action_dim is 4, the env needs 9"):
        construct.from_folder(config, make_spec(action_dim=9), seed=0, statistics=stats)


def test_missing_processors_and_tokenizer(folder):
    shutil.rmtree(folder / "vlm")
    change(folder / "config.json", vlm_model_name=str(folder / "vlm"))
    with pytest.raises(ValueError, match="VLM of this policy: there is no folder"):
        load(folder)


def test_no_hub(tmp_path, monkeypatch):
    """Nobody listens on that port: the answer is an error within the second, not a minute of retries."""
    import time

    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    begun = time.monotonic()
    with pytest.raises(ValueError, match="not in the hub's cache, and the hub did not give it"):
        load(Path("nobody/nothing"))
    assert time.monotonic() - begun < 5


def test_a_vlm_by_name(tmp_path):
    """A SmolVLM's folder under policy.vlm: with its weights, to bfloat16 as LeRobot reads them, or with random ones."""
    vlm, named = tmp_path / "vlm", {"type": "named", "name": str(tmp_path / "vlm"), "num_layers": 2, "image_size": 16}
    vlm.mkdir()
    for name, text in vlm_files(VLM).items():
        (vlm / name).write_text(text)
    random = construct.from_scratch(smolvla_config(vlm={**named, "weights": False}), make_spec(), seed=0)
    tiny = make_smolvla()
    assert {k: v.shape for k, v in random.params.items()} == {k: v.shape for k, v in tiny.params.items()}
    torch.manual_seed(5)
    model = SmolVLMForConditionalGeneration(SmolVLMConfig.from_pretrained(vlm))
    model.save_pretrained(vlm)
    config = smolvla_config(vlm=named)
    policy = construct.from_scratch(config, make_spec(), seed=0, statistics=make_statistics())
    own = policy.module.policy.model.vlm_with_expert.vlm.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(own[name], value.bfloat16().float(), rtol=0, atol=0)
    assert {v.dtype for v in policy.module.parameters()} == {torch.float32}
    action = policy.act(make_obs(4), SEEDS, noise_scale=0.0).action
    again = construct.from_parts(config, policy.metadata(), {k: v.numpy() for k, v in policy.params.items()})
    np.testing.assert_array_equal(again.act(make_obs(4), SEEDS, noise_scale=0.0).action, action)
    policy.export(tmp_path / "out")
    _, start, _ = policy._draw(SEEDS)
    np.testing.assert_array_equal(lerobot_chunk(tmp_path / "out", make_obs(4), start, None), action)
    with pytest.raises(ValueError, match=r"policy\.vlm: there is no folder"):
        construct.from_scratch(smolvla_config(vlm={**named, "name": str(tmp_path / "no")}), make_spec(), seed=0)


def test_relative_actions_act_but_are_not_imitated(tmp_path):
    """The same weights with and without: the actions differ by the state, dim by dim, where nothing is clipped."""
    relative = {"use_relative_actions": True, "relative_exclude_joints": []}
    for name, changes in (("pi0", {}), ("relative", relative)):
        write_gemma(tmp_path / name, "pi0", **changes)
    obs = replace(make_obs(4), state=np.linspace(-0.3, 0.3, 12, dtype=np.float32).reshape(4, 3))
    with small_gemma():
        byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
        plain, policy = (load(tmp_path / name, tokenizer=tmp_path / "tokenizer") for name in ("pi0", "relative"))
    actions = [p.act(obs, SEEDS, noise_scale=0.0).action for p in (plain, policy)]
    inside = (np.abs(actions[0]) < 1) & (np.abs(actions[1]) < 1)
    assert inside.mean() > 0.5
    moved = np.broadcast_to(obs.state[:, None, :2], actions[0].shape)
    np.testing.assert_allclose((actions[1] - actions[0])[inside], moved[inside], atol=1e-5)
    with pytest.raises(ValueError, match="relative to the state"):
        policy.imitation_loss(
            policy._on_device(policy.imitation_inputs(obs)), torch.zeros(4, 3, 2), torch.Generator(), 1
        )


def test_sentences_that_would_be_cut_off(made):
    long = make_spec(instructions=("push the red cube to the far left corner",))
    with pytest.raises(ValueError, match="takes 41 tokens, the policy reads 20: its end would be cut off"):
        construct.from_scratch(smolvla_config(), long, seed=0)
    with (
        small_gemma(),
        pytest.raises(ValueError, match="takes 77 tokens, the policy reads 64"),
    ):  # with its state in words
        config = LeRobotConfig(path=str(made / "pi05"), tokenizer=made / "tokenizer")
        construct.from_folder(config, long, seed=0)


def test_options_and_samplers_that_do_not_exist(folder):
    with pytest.raises(ValueError, match=r"names 'num_step'.*did you mean num_steps"):
        load(folder, options={"num_step": 3})
    assert load(folder, options={"num_steps": 3}).act(make_obs(1), SEEDS[:1]).logp.shape == (1, 3)
    with pytest.raises(ValueError, match="sampler gaussian is not for a smolvla"):
        load(folder, sampler={"type": "gaussian"})
    with pytest.raises(ValueError, match=r"sampler\.steps 9 exceeds the 4"):
        load(folder, sampler={"type": "hybrid", "steps": 9})
    with pytest.raises(ValueError, match="fits none of the action expert's layers"):
        load(folder, tune={"type": "lora", "targets": ("attention",)})
    with pytest.raises(ValueError, match="action_low has 1 numbers"):
        load(folder, action_low=(0,), action_high=(1,))


def test_actions_beyond_the_envs_are_imitated_too(folder):
    """The env executes two actions of the three that the policy predicts: demonstrations have all three."""
    spec = make_spec(chunk=2)
    policy = construct.from_folder(LeRobotConfig(path=str(folder)), spec, seed=0)
    demos = Demonstrations(
        images={c: np.zeros((1, 5, 16, 16, 3), np.uint8) for c in spec.cameras},
        state=np.zeros((1, 5, 3), np.float32),
        instruction=("lift it",),
        action=np.arange(10, dtype=np.float32).reshape(1, 5, 2) / 10,
        mask=np.ones((1, 5), bool),
        success=np.ones(1, bool),
    )
    obs, action = demonstrated(demos, policy.config, policy, spec)
    assert action.shape == (5, 3, 2) and len(obs.state) == 5
    np.testing.assert_allclose(action[3, :, 0], [0.6, 0.8, 0.8])  # the last one is repeated
    inputs = policy._on_device(policy.imitation_inputs(obs))
    loss = policy.imitation_loss(inputs, torch.from_numpy(action), torch.Generator().manual_seed(0), 2)
    fewer = policy.imitation_loss(inputs, torch.from_numpy(action[:, :2].copy()), torch.Generator().manual_seed(0), 2)
    assert loss.item() != fewer.item() and policy.act(obs, np.arange(5, dtype=np.uint32)).action.shape == (5, 2, 2)
