"""LeRobot's reward classifier from a folder that LeRobot writes: the same numbers, and what a folder may not be."""

import json
import shutil
from typing import Any

import numpy as np
import pytest
from synthetic import SPEC, make_episodes

torch = pytest.importorskip("torch")
pytest.importorskip("lerobot")

from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.rewards.classifier.configuration_classifier import RewardClassifierConfig  # noqa: E402
from lerobot.rewards.classifier.modeling_classifier import Classifier  # noqa: E402
from lerobot.rewards.classifier.processor_classifier import make_classifier_processor  # noqa: E402
from lerobot.rewards.topreward.configuration_topreward import TOPRewardConfig  # noqa: E402
from lerobot.rewards.topreward.modeling_topreward import TOPRewardModel  # noqa: E402
from lerobot.rewards.topreward.processor_topreward import make_topreward_pre_post_processors  # noqa: E402
from transformers import AutoProcessor, ViTConfig, ViTModel  # noqa: E402

from vla_rlaif.interfaces import RewardModel  # noqa: E402
from vla_rlaif.preferences.tiny_judge import write_tiny_judge  # noqa: E402
from vla_rlaif.reward_models.lerobot import LeRobotReward  # noqa: E402
from vla_rlaif.reward_terms_config import LeRobotRewardConfig  # noqa: E402

KEY, MEAN, STD = "observation.images.top", 0.5, 0.25
LENGTH, VALID = np.array([4, 2, 4, 1, 4, 3]), np.array([True, True, False, True, True, True])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, classifier) of random weights, with statistics."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    settings: dict[str, Any] = sizes | {"image_size": 8, "patch_size": 4}
    ViTModel(ViTConfig(**settings)).save_pretrained(folder / "vit")
    config = RewardClassifierConfig(
        model_name=str(folder / "vit"),
        model_type="transformer",
        num_cameras=1,
        hidden_dim=16,
        input_features={KEY: PolicyFeature(type=FeatureType.VISUAL, shape=(3, 8, 8))},
    )
    model = Classifier(config)
    model.save_pretrained(folder / "reward")
    statistics = {KEY: {"mean": torch.full((3, 1, 1), MEAN), "std": torch.full((3, 1, 1), STD)}}
    make_classifier_processor(config, statistics)[0].save_pretrained(folder / "reward")
    return folder / "reward", model.eval()


@pytest.mark.parametrize("over", ["last", "max", "mean"])
def test_scores_are_lerobots_probabilities(made, over):
    folder, model = made
    episodes = make_episodes(6, length=LENGTH, valid=VALID)
    reward = LeRobotReward.load(LeRobotRewardConfig(folder=folder, over=over, batch=4), SPEC)
    assert isinstance(reward, RewardModel) and not reward.privileged and reward.version == 0
    found = reward.score(episodes)
    for row in range(6):
        if not VALID[row]:
            assert np.isnan(found[row])
            continue
        frames = torch.from_numpy(episodes.images["top"][row, : LENGTH[row] + 1]).movedim(-1, 1).float() / 255
        with torch.inference_mode():
            wanted = model.predict([(frames - MEAN) / STD]).probabilities.numpy()
        value = {"last": wanted[-1], "max": wanted.max(), "mean": wanted.mean()}[over]
        np.testing.assert_allclose(found[row], value, rtol=1e-5)
    assert len(set(found[VALID].tolist())) == 5, "a probability, not a 0 or a 1"


def test_frames_of_another_size_are_resized(made):
    folder, _ = made
    large = make_episodes(3)
    vars(large)["images"]["top"] = large.images["top"].repeat(2, axis=2).repeat(2, axis=3)
    reward = LeRobotReward.load(LeRobotRewardConfig(folder=folder), SPEC)
    np.testing.assert_allclose(reward.score(large), reward.score(make_episodes(3)), atol=2e-3)


def test_cameras_are_matched_by_name_or_by_hand(made):
    folder, _ = made
    episodes = make_episodes(3)
    spec = type(SPEC)(**{**vars(SPEC), "cameras": ("front",)})
    with pytest.raises(ValueError, match=rf"looks at {KEY}, and the env's cameras are front: say which.*{KEY}: CAMERA"):
        LeRobotReward.load(LeRobotRewardConfig(folder=folder), spec)
    with pytest.raises(ValueError, match=rf"reward.cameras names 'wrist', the model's images are {KEY}"):
        LeRobotReward.load(LeRobotRewardConfig(folder=folder, cameras={"wrist": "front"}), spec)
    by_hand = LeRobotReward.load(LeRobotRewardConfig(folder=folder, cameras={KEY: "front"}), spec)
    wanted = LeRobotReward.load(LeRobotRewardConfig(folder=folder), SPEC).score(episodes)
    vars(episodes)["images"]["front"] = episodes.images["top"]
    np.testing.assert_array_equal(by_hand.score(episodes), wanted)


VIDEO_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|video_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}"
)


def test_a_clip_is_scored_as_lerobots_topreward_does(tmp_path):
    """A Qwen3-VL of random weights; the clip of a short episode shows some frames twice."""
    spec = type(SPEC)(**{**vars(SPEC), "image_size": 16})
    write_tiny_judge(tmp_path / "vlm", spec)
    processor = AutoProcessor.from_pretrained(tmp_path / "vlm")
    processor.chat_template = VIDEO_TEMPLATE
    processor.save_pretrained(tmp_path / "vlm")
    (tmp_path / "reward").mkdir()
    config = TOPRewardConfig(vlm_name=str(tmp_path / "vlm"), torch_dtype="float32", device="cpu", image_key=KEY)
    config._save_pretrained(tmp_path / "reward")
    episodes = make_episodes(4, length=np.array([4, 2, 4, 4]), valid=np.array([True, True, False, True]))
    vars(episodes)["images"]["top"] = episodes.images["top"].repeat(2, axis=2).repeat(2, axis=3)
    found = LeRobotReward.load(LeRobotRewardConfig(folder=tmp_path / "reward", frames=4, batch=2), spec).score(episodes)
    model, prepare = TOPRewardModel(config).eval(), make_topreward_pre_post_processors(config)[0]
    for row, frames in {0: [0, 1, 3, 4], 1: [0, 1, 1, 2], 3: [0, 1, 3, 4]}.items():
        clip = torch.from_numpy(episodes.images["top"][row, frames]).movedim(-1, 1)
        wanted = model.compute_reward(prepare({KEY: clip[None], "task": [episodes.instruction[row]]}))
        np.testing.assert_allclose(found[row], wanted.item(), rtol=1e-4)
    assert np.isnan(found[2])


def changed(made, tmp_path, **values):
    folder = tmp_path / "changed"
    shutil.copytree(made[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


def load(folder, **settings):
    return LeRobotReward.load(LeRobotRewardConfig(folder=folder, **settings), SPEC)


def test_a_folder_that_is_none_is_named(made, tmp_path):
    with pytest.raises(ValueError, match=r"holds no config.json"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"of type 'sarm'; wanted reward_classifier or topreward"):
        load(changed(made, tmp_path / "a", type="sarm"))
    with pytest.raises(ValueError, match=r"Start its evaluation server and use reward.type robometer"):
        load(changed(made, tmp_path / "b", type="robometer"))
    broken = changed(made, tmp_path / "c")
    (broken / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is damaged"):
        load(broken)
    (broken / "config.json").write_text((made[0] / "config.json").read_text())
    (broken / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot be loaded by LeRobot"):
        load(broken)


def test_weights_that_do_not_fit_are_not_taken(made, tmp_path):
    """LeRobot itself says so in a log line and goes on with random ones."""
    with pytest.raises(ValueError, match="cannot be loaded by LeRobot"):
        load(changed(made, tmp_path, hidden_dim=32))


def test_no_code_of_an_encoder_is_executed_and_none_is_downloaded(made, tmp_path):
    with pytest.raises(ValueError, match=r"'lerobot/resnet10', which is no local transformers folder.*reward.encoder"):
        load(changed(made, tmp_path / "a", model_name="lerobot/resnet10"))
    encoder = tmp_path / "encoder"
    shutil.copytree(made[0].parent / "vit", encoder)
    elsewhere = changed(made, tmp_path / "b", model_name="lerobot/resnet10")
    wanted = load(made[0]).score(make_episodes(3))
    np.testing.assert_array_equal(load(elsewhere, encoder=encoder).score(make_episodes(3)), wanted)
    config = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Evil"}}))
    with pytest.raises(ValueError, match="has an auto_map: it brings code of its own"):
        load(elsewhere, encoder=encoder)
