"""A reward model of LeRobot 0.6 from a local folder, as its `save_pretrained` writes it.

    reward_classifier  looks at single frames: the probability of the last class (of two: of success)
    topreward          looks at a clip and the instruction: the log-probability that a Qwen3-VL gives to "True"

LeRobot's Robometer is served by its own evaluation server (``robometer.py``); its SARM needs a CLIP that it downloads.
Nothing in a folder is executed: LeRobot itself would run code that comes with an encoder.
Axes: see types.py; K frames shown, B frames or clips at a time, C channels.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from lerobot.configs.rewards import RewardModelConfig
from lerobot.processor import PolicyProcessorPipeline
from lerobot.rewards import factory

from vla_rlaif.policies.lerobot.processors import to_float
from vla_rlaif.reward_terms_config import LeRobotRewardConfig
from vla_rlaif.types import EnvSpec, Episodes

FRAMEWISE, CLIPWISE = "reward_classifier", "topreward"
PREPROCESSORS = ("reward_preprocessor.json", "policy_preprocessor.json", "classifier_preprocessor.json")
Prepare = Callable[[Any], Any]  # LeRobot's pipeline


class LeRobotReward:
    """Scores episodes by frames and instruction; NaN for an invalid episode or where the model gives no number."""

    privileged: ClassVar[bool] = False

    def __init__(
        self, model: Any, prepare: Prepare, *, cameras: Mapping[str, str], config: LeRobotRewardConfig
    ) -> None:
        """``cameras``: LeRobot's image keys, in the model's order, to cameras of the env."""
        self._model, self._prepare, self._cameras, self._config = model, prepare, dict(cameras), config

    @classmethod
    def load(cls, config: LeRobotRewardConfig, spec: EnvSpec) -> "LeRobotReward":
        """Raises ValueError if the folder holds no reward model that can be used for this env, with what to change."""
        settings = _settings(config)
        try:
            reward_class = factory.get_reward_model_class(settings.type)
            model: Any = reward_class.from_pretrained(str(config.folder), config=settings, strict=True)
            prepare = _preprocessor(config.folder, settings)
        except (OSError, RuntimeError, KeyError) as error:
            raise ValueError(f"reward.folder {config.folder} cannot be loaded by LeRobot: {error}") from None
        return cls(model.eval(), prepare, cameras=_cameras(settings, config, spec), config=config)

    @property
    def version(self) -> int:
        return 0

    def score(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        rows = np.flatnonzero(episodes.valid)
        scores = np.full(len(episodes.valid), np.nan, np.float32)
        if len(rows):
            of_rows = self._by_frame if self._model.config.type == FRAMEWISE else self._by_clip
            values = of_rows(episodes, rows)
            scores[rows] = np.where(np.isfinite(values), values, np.nan)
        return scores

    def _by_frame(self, episodes: Episodes, rows: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        last = episodes.num_decisions[rows]
        if self._config.over == "last":
            return self._success(episodes, rows, last)
        row, frame = np.nonzero(np.arange(episodes.state.shape[1]) <= last[:, None])
        values = self._success(episodes, rows[row], frame)
        parts = np.split(values, np.flatnonzero(np.diff(row)) + 1)
        return np.array([part.max() if self._config.over == "max" else part.mean() for part in parts], np.float32)

    def _success(
        self, episodes: Episodes, rows: Int[np.ndarray, " n"], frames: Int[np.ndarray, " n"]
    ) -> Float[np.ndarray, " n"]:
        """The probability of success in single frames. LeRobot's own compute_reward rounds it to 0 or 1, which leaves a
        group of failures without spread."""

        def ask(part: slice) -> Float[torch.Tensor, " b"]:
            shown = {key: episodes.images[camera][rows[part], frames[part]] for key, camera in self._cameras.items()}
            batch = self._prepare({key: self._sized(key, to_float(torch.from_numpy(v))) for key, v in shown.items()})
            found = self._model.predict([batch[key] for key in self._cameras]).probabilities
            return found if found.ndim == 1 else found[:, -1]

        return self._in_batches(ask, len(rows))

    def _sized(self, key: str, images: Float[torch.Tensor, "b C height width"]) -> Float[torch.Tensor, "b C h w"]:
        """As large as the model was made for."""
        wanted = tuple(self._model.config.input_features[key].shape[-2:])
        if tuple(images.shape[-2:]) == wanted:
            return images
        return torch.nn.functional.interpolate(images, wanted, mode="bilinear", antialias=True, align_corners=False)

    def _by_clip(self, episodes: Episodes, rows: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        (key, camera), *_ = self._cameras.items()
        last = episodes.num_decisions[rows]
        shown = np.linspace(0, last, self._config.frames, axis=1).round().astype(int)  # short ones show some twice

        def ask(part: slice) -> Float[torch.Tensor, " b"]:
            clips = episodes.images[camera][rows[part, None], shown[part]]
            task = [episodes.instruction[row] for row in rows[part].tolist()]
            batch = self._prepare({key: torch.movedim(torch.from_numpy(clips), -1, -3), "task": task})
            return self._model.compute_reward(batch)

        return self._in_batches(ask, len(rows))

    def _in_batches(self, ask: Callable[[slice], Float[torch.Tensor, " b"]], num: int) -> Float[np.ndarray, " n"]:
        with torch.inference_mode():
            parts = [ask(slice(a, a + self._config.batch)).float().cpu() for a in range(0, num, self._config.batch)]
        return torch.cat(parts).numpy().astype(np.float32)


def _settings(config: LeRobotRewardConfig) -> Any:
    """LeRobot's config of the folder, checked, on the device that is asked for."""
    path = config.folder / "config.json"
    if not path.is_file():
        raise ValueError(f"reward.folder {config.folder} holds no config.json; wanted a reward model of LeRobot.")
    try:
        kind = json.loads(path.read_text()).get("type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from None
    if kind not in (FRAMEWISE, CLIPWISE):
        hint = " Start its evaluation server and use reward.type robometer." if kind == "robometer" else ""
        raise ValueError(f"{path} is of type {kind!r}; wanted {FRAMEWISE} or {CLIPWISE}.{hint}")
    settings: Any = RewardModelConfig.from_pretrained(config.folder)
    settings.device = config.device
    if kind == CLIPWISE:
        settings.success_threshold = float("-inf")  # the log-probability itself
        settings.max_frames = config.frames
    name = "model_name" if kind == FRAMEWISE else "vlm_name"
    encoder = config.encoder or Path(vars(settings)[name])
    vars(settings)[name] = str(_local_encoder(encoder, path, name))
    return settings


def _local_encoder(folder: Path, config: Path, name: str) -> Path:
    """LeRobot loads it with trust_remote_code, so it must be here, and without code."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{name} of {config} is {str(folder)!r}, which is no local transformers folder: download it, look at it, "
            "and name it as reward.encoder."
        )
    if "auto_map" in json.loads(path.read_text()):
        raise ValueError(f"{path} has an auto_map: it brings code of its own, which is not executed here.")
    return folder


def _preprocessor(folder: Path, settings: Any) -> Prepare:
    """The folder's own, with its statistics; without one, what LeRobot makes by default."""
    saved = next((name for name in PREPROCESSORS if (folder / name).is_file()), None)
    if saved is None:
        return factory.make_reward_pre_post_processors(settings)[0]
    return PolicyProcessorPipeline.from_pretrained(
        str(folder), config_filename=saved, overrides={"device_processor": {"device": settings.device}}
    )


def _cameras(settings: Any, config: LeRobotRewardConfig, spec: EnvSpec) -> dict[str, str]:
    """Image keys of the model to cameras of the env."""
    keys: Sequence[str] = [key for key in settings.input_features if key.startswith("observation.image")]
    if settings.type == CLIPWISE:
        keys = [settings.image_key]
    strange = [key for key in config.cameras if key not in keys]
    if strange:
        raise ValueError(f"reward.cameras names {strange[0]!r}, the model's images are {', '.join(keys)}.")
    found = {key: config.cameras[key] if key in config.cameras else key.rpartition(".")[2] for key in keys}
    for key, camera in found.items():
        if camera not in spec.cameras:
            raise ValueError(
                f"the model looks at {key}, and the env's cameras are {', '.join(spec.cameras)}: say which one it is "
                f"with reward.cameras: {{{key}: CAMERA}}."
            )
    return found
