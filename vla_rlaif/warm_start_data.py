"""Demonstrations for a warm start: from a folder of ours, a LeRobotDataset's, or the Hugging Face Hub, held against
the env that they are for. Nothing is resized, renamed or rescaled that the config does not name.

Axes: E demonstrations, L recorded env steps.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Float

from vla_rlaif.dataset import Demonstrations, format_of, load_demonstrations
from vla_rlaif.types import EnvSpec
from vla_rlaif.warm_start_config import WarmStartConfig

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def demonstrations_from(data: Path, spec: EnvSpec, config: WarmStartConfig) -> Demonstrations:
    """Those of ``data``, a folder or the name of a dataset on the Hub, in the units and with the names of the env.

    Raises:
        ValueError: there is no such dataset, or it does not fit the env and ``config``.
    """
    folder = _folder(data)
    if format_of(folder) == "lerobot":
        demos = _from_lerobot(folder, spec, config)
    else:
        demos = load_demonstrations(folder)
        keys = _cameras(demos.images, spec, config, prefix="")
        demos = replace(demos, images={camera: demos.images[key] for camera, key in keys.items()})
        if config.data_episodes is not None:
            demos = _first(demos, config.data_episodes)
    sizes = {camera: images.shape[2:4] for camera, images in demos.images.items()}
    _require_sizes(sizes, spec, folder, can_resize=False)
    demos = replace(
        demos,
        action=_scaled(demos.action, demos.mask, config, folder),
        instruction=tuple(config.data_tasks.get(said, said) for said in demos.instruction),
    )
    _require_numbers(demos, spec, folder)
    return demos


def _folder(data: Path) -> Path:
    if data.exists():
        return data
    if not _HUB_ID.fullmatch(str(data)):
        raise ValueError(f"there is no dataset at {data}; `vla-rlaif collect` or LeRobot makes one.")
    from vla_rlaif.lerobot_hub import download

    return download(str(data))


def _from_lerobot(folder: Path, spec: EnvSpec, config: WarmStartConfig) -> Demonstrations:
    """Whatever the metadata can tell is checked before a frame is read."""
    from vla_rlaif.lerobot_files import ACTION, IMAGES, STATE, open_files
    from vla_rlaif.lerobot_import import read_demonstrations

    files = open_files(folder)
    keys = _cameras(files.cameras, spec, config, prefix=IMAGES)
    if not config.data_resize:
        _require_sizes({camera: files.cameras[key] for camera, key in keys.items()}, spec, folder, can_resize=True)
    for key, name, wanted in ((STATE, "state", spec.state_dim), (ACTION, "action", spec.action_dim)):
        found = tuple(files.features[key]["shape"]) if key in files.features else None
        if found != (wanted,):
            raise ValueError(f"{folder} has {key} of shape {found}, the env's {name} is {(wanted,)}.")
    if spec.fps is not None and files.fps != spec.fps and not config.data_any_fps:
        raise ValueError(
            f"{folder} has {files.fps:g} frames a second, the env {spec.fps} steps: its actions mean another speed. "
            "Record it at the env's rate, or set warm_start.data_any_fps if that is what you want."
        )
    return read_demonstrations(folder, cameras=keys, image_size=spec.image_size, episodes=config.data_episodes)


def _cameras(found: Iterable[str], spec: EnvSpec, config: WarmStartConfig, *, prefix: str) -> dict[str, str]:
    """The dataset's key of each camera of the env."""
    there = sorted(found)
    unknown = sorted(config.data_cameras.keys() - set(spec.cameras))
    keys = {camera: config.data_cameras.get(camera, prefix + camera) for camera in spec.cameras}
    missing = sorted(camera for camera, key in keys.items() if key not in there)
    if unknown or missing:
        raise ValueError(
            f"the env has the cameras {', '.join(spec.cameras)}, the dataset {', '.join(there) or 'none'}"
            + (f"; no images for {', '.join(f'{c} ({keys[c]})' for c in missing)}" if missing else "")
            + (f"; the env has no {', '.join(unknown)}" if unknown else "")
            + ". Name the dataset's side of each in warm_start.data_cameras, env camera: dataset key."
        )
    return keys


def _require_sizes(sizes: Mapping[str, tuple[int, ...]], spec: EnvSpec, folder: Path, *, can_resize: bool) -> None:
    wanted = (spec.image_size, spec.image_size)
    other = {camera: size for camera, size in sizes.items() if size != wanted}
    if other:
        found = ", ".join(f"{camera} {height} x {width}" for camera, (height, width) in sorted(other.items()))
        raise ValueError(
            f"{folder} has images of other sizes than the env's {wanted[0]} x {wanted[1]} pixels: {found}. "
            + ("Set warm_start.data_resize to scale them, or the env's image size." if can_resize else "Collect again.")
        )


def _scaled(
    action: Float[np.ndarray, "E L A"], mask: np.ndarray, config: WarmStartConfig, folder: Path
) -> Float[np.ndarray, "E L A"]:
    """The given range becomes the env's [-1, 1]."""
    low, high = np.array(config.data_action_low), np.array(config.data_action_high)
    if low.size:
        if low.shape != action.shape[2:]:
            raise ValueError(f"warm_start.data_action_low has {low.size} dims, an action {action.shape[2]}.")
        action = (2 * (action - low) / (high - low) - 1).astype(np.float32)
    outside = np.abs(np.where(mask[..., None], action, 0)) > 1 + 1e-5  # float32 rounds what was scaled
    if outside.any():
        live = action[mask]
        raise ValueError(
            f"the actions of {folder} go from {_listed(live.min(axis=0))} to {_listed(live.max(axis=0))}, an env's are "
            "within [-1, 1] in every dim; give their range as warm_start.data_action_low and data_action_high."
        )
    return np.clip(action, -1, 1)


def _require_numbers(demos: Demonstrations, spec: EnvSpec, folder: Path) -> None:
    for name, values, wanted in (("state", demos.state, spec.state_dim), ("action", demos.action, spec.action_dim)):
        if values.shape[2] != wanted:
            raise ValueError(f"{folder} has {values.shape[2]} dims of {name}, the env {wanted}.")
        bad = np.flatnonzero(~np.isfinite(values).all(axis=(1, 2)))
        if len(bad):
            raise ValueError(f"{folder}: the {name} of episodes {bad[:10].tolist()} is not finite; leave them out.")


def _first(demos: Demonstrations, num: int) -> Demonstrations:
    return replace(
        demos,
        images={k: v[:num] for k, v in demos.images.items()},
        instruction=demos.instruction[:num],
        **{k: vars(demos)[k][:num] for k in ("state", "action", "mask", "success")},
    )


def _listed(values: np.ndarray) -> str:
    return "[" + ", ".join(f"{v:.3g}" for v in values.tolist()) + "]"
