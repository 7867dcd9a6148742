"""A LeRobotDataset, format v3.0, as our rollouts (if ``lerobot_export`` wrote them) or as demonstrations (any).

The result is held in memory whole; beside it, a few hundred frames at a time.

Axes as in types.py and dataset.py; h and w are the pixels of a camera.
"""

import base64
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vla_rlaif.dataset import Demonstrations
from vla_rlaif.lerobot_files import (
    ACTION,
    IMAGES,
    STATE,
    Files,
    decode_image,
    decode_video,
    open_files,
    read_notes,
    rows,
)
from vla_rlaif.types import Episodes, Starts, under

SUCCESS = "next.success"
TRACE, LAST = "rollout.trace.", "rollout.last."
_MEMINFO = Path("/proc/meminfo")
_COPIES = 2  # imitation gathers the frames of all its samples once


def kind_of(folder: Path) -> str:
    """What our notes say the dataset is; demonstrations, if another program recorded it."""
    notes = read_notes(folder)
    return "demonstrations" if notes is None else notes["kind"]


def read_episodes(folder: Path) -> list[tuple[list[str], Episodes]]:
    """All shards with the ids of their episodes, as they were appended."""
    files, notes = open_files(folder), read_notes(folder)
    if notes is None or notes["kind"] != "episodes":
        raise ValueError(f"{folder} holds demonstrations, wanted episodes.")
    sizes = [shard["episodes"] for shard in notes["shards"]]
    if sum(sizes) != files.num_episodes:
        raise ValueError(
            f"{folder} is half-written: it has {files.num_episodes} episodes in shards of {sizes}. Collect it again."
        )
    arrays, instruction = _rollouts(files, notes)
    bounds = np.cumsum([0, *sizes]).tolist()
    return [
        ([f"{shard}:{row}" for row in range(end - begin)], _episodes(arrays, instruction, slice(begin, end)))
        for shard, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]


def read_demonstrations(
    folder: Path,
    *,
    cameras: Mapping[str, str] | None = None,
    image_size: int | None = None,
    episodes: int | None = None,
) -> Demonstrations:
    """``cameras`` are features by the name that we give them; without, all of them, by what follows
    ``observation.images.``. Images are scaled to ``image_size`` pixels square, without keeping their aspect, if that is
    given. The first ``episodes``, or all. One that does not say whether it succeeded counts as a success.
    """
    files = open_files(folder)
    if kind_of(folder) != "demonstrations":
        raise ValueError(f"{folder} holds {kind_of(folder)}, wanted demonstrations (a frame an env step).")
    keys = {k.removeprefix(IMAGES): k for k in files.cameras} if cameras is None else dict(cameras)
    sizes = {c: files.cameras[k] if image_size is None else (image_size, image_size) for c, k in keys.items()}
    num = files.num_episodes if episodes is None else min(episodes, files.num_episodes)
    lengths = files.lengths[:num]
    longest = int(lengths.max())
    _require_memory(num * longest * sum(3 * h * w for h, w in sizes.values()), files, num)
    images = {c: np.zeros((num, longest, *size, 3), np.uint8) for c, size in sizes.items()}
    has_success = SUCCESS in files.features
    numbers = [STATE, ACTION, *([SUCCESS] if has_success else [])]
    arrays = {k: np.zeros((num, longest, *files.features[k]["shape"]), files.features[k]["dtype"]) for k in numbers}
    task = np.full((num, longest), -1)
    stills = {c: k for c, k in keys.items() if files.features[k]["dtype"] == "image"}
    for e, step, values in rows(files, [*numbers, *stills.values()], episodes=num):
        for key in numbers:
            arrays[key][e, step] = values[key]
        for camera, key in stills.items():
            images[camera][e, step] = _scaled(values[key], sizes[camera])
        task[e, step] = values["task_index"][:, 0]
    for camera in keys.keys() - stills.keys():
        for e in range(num):
            images[camera][e, : lengths[e]] = _scaled(decode_video(files, keys[camera], e), sizes[camera])
    return Demonstrations(
        images=images,
        state=arrays[STATE].astype(np.float32, copy=False),
        instruction=_instructions(files, task, lengths),
        action=arrays[ACTION].astype(np.float32, copy=False),
        mask=np.arange(longest) < lengths[:, None],
        success=np.logical_or.reduce(arrays[SUCCESS][..., 0], axis=1) if has_success else np.ones(num, bool),
    )


def _rollouts(files: Files, notes: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Every column with its episode and decision as leading axes; frames of images and states have one more."""
    num, decisions = files.num_episodes, notes["decisions"]
    images = {key: np.zeros((num, decisions + 1, *size, 3), np.uint8) for key, size in files.cameras.items()}
    stills = [key for key in images if files.features[key]["dtype"] == "image"]
    traces = {TRACE + k: (leaf["shape"], leaf["dtype"]) for k, leaf in notes["trace"].items()}
    own = [k for k in files.features if k.startswith("rollout.") and not k.startswith((TRACE, LAST))]
    numbers = [ACTION, SUCCESS, *own]
    shapes = {k: (files.features[k]["shape"], files.features[k]["dtype"]) for k in numbers} | traces
    arrays = {k: np.zeros((num, decisions, *shape), dtype) for k, (shape, dtype) in shapes.items()}
    state = np.zeros((num, decisions + 1, *files.features[STATE]["shape"]), files.features[STATE]["dtype"])
    task = np.zeros(num, np.int64)
    for n, t, values in rows(files, [*numbers, *traces, *stills, STATE, "next.state"]):
        task[n] = values["task_index"][:, 0]
        for key in numbers:
            arrays[key][n, t] = values[key]
        for key, (shape, dtype) in traces.items():
            raw = b"".join(base64.b64decode(text) for text in values[key])
            arrays[key][n, t] = np.frombuffer(raw, dtype).reshape(-1, *shape)
        state[n, t], state[n, t + 1] = values[STATE], values["next.state"]
        for key in stills:
            images[key][n, t] = values[key]
    for key in images.keys() - stills:
        for n in range(num):
            images[key][n, : files.lengths[n]] = decode_video(files, key, n)
    for n, length in enumerate(files.lengths):  # frames after the end repeat the last
        state[n, length + 1 :] = state[n, length]
    _fill_last(files, images)
    live = np.arange(decisions) < files.lengths[:, None]
    arrays[ACTION] = arrays[ACTION].reshape(num, decisions, notes["chunk"], -1)
    return images | arrays | {STATE: state, "mask": live}, tuple(files.tasks[i] for i in task.tolist())


def _fill_last(files: Files, images: Mapping[str, UInt8[np.ndarray, "N F h w 3"]]) -> None:
    columns = {key: LAST + key.removeprefix(IMAGES) for key in images}
    for n, t, values in rows(files, columns.values()):
        for key, column in columns.items():
            for row in np.flatnonzero(values[column] != ""):
                images[key][n[row], t[row] + 1 :] = decode_image(base64.b64decode(values[column][row]), files.folder)


def _episodes(arrays: Mapping[str, np.ndarray], instruction: tuple[str, ...], some: slice) -> Episodes:
    here = {k: v[some] for k, v in arrays.items()}
    once = lambda name: here[f"rollout.{name}"][:, 0, 0]  # noqa: E731
    return Episodes(
        images=under(IMAGES, here),
        state=here[STATE],
        instruction=instruction[some],
        action=here[ACTION],
        logp=here["rollout.logp"],
        trace=under(TRACE, here),
        mask=here["mask"],
        executed=here["rollout.executed"][..., 0],
        success=np.logical_or.reduce(here[SUCCESS][..., 0], axis=1),
        truth=once("truth"),
        valid=once("valid"),
        starts=Starts(seed=once("seed"), group=once("group"), member=once("member")),
        version=int(once("version")[0]),
    )


def _instructions(files: Files, task: np.ndarray, lengths: np.ndarray) -> tuple[str, ...]:
    said = [np.unique(row[:length]) for row, length in zip(task, lengths, strict=True)]
    several = [e for e, which in enumerate(said) if len(which) > 1]
    if several:
        raise ValueError(
            f"{files.folder}: episodes {several[:10]} change their task on the way; an instruction is for a whole "
            "episode here. Split them with LeRobot's tools."
        )
    return tuple(files.tasks[int(which[0])] for which in said)


def _scaled(images: UInt8[np.ndarray, "B h w 3"], size: tuple[int, int]) -> UInt8[np.ndarray, "B height width 3"]:
    if images.shape[1:3] == size:
        return images
    height, width = size
    return np.stack([np.asarray(Image.fromarray(i).resize((width, height), Image.Resampling.BILINEAR)) for i in images])


def _require_memory(num_bytes: int, files: Files, episodes: int) -> None:
    """Linux kills a process that asks for too much, without a word."""
    if not _MEMINFO.exists():
        return
    table = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    free = 1024 * int(table["MemAvailable"].split()[0])
    if _COPIES * num_bytes > free:
        raise ValueError(
            f"the images of {episodes} episodes of {files.folder} take {num_bytes / 2**30:.1f} GiB, twice while "
            f"imitating, and {free / 2**30:.1f} GiB are free; take fewer with warm_start.data_episodes, or smaller "
            "ones with warm_start.data_resize and the env's image size."
        )
