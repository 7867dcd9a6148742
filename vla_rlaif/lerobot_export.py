"""Rollouts and demonstrations as a LeRobotDataset, format v3.0, that LeRobot reads and trains on as it is.

A frame (row) of a demonstration is one env step. A frame of a rollout is one decision, because a rollout has images
where the policy looks only: its ``action`` is the chunk, H actions of A dims in one vector, at 1 / H of the env's rate.
What the policy said after an episode's end is left out. ``lerobot_import`` reads both back, bit for bit.

Keys: observation.images.<camera>, observation.state, action, task, next.reward, next.done, next.success, and of
rollouts next.state and rollout.*: logp, executed, truth, valid, seed, group, member, version as numbers,
trace.<leaf> (raw bytes in base64) and last.<camera> (the final frame as base64 PNG, in an episode's last row).
Traces are strings because LeRobot keeps a histogram of 5,000 bins for every number of a vector, final frames because
every image feature becomes an input of a policy. No extra key begins with ``observation`` or ``action``, for the same
reason.

Axes as in types.py and dataset.py.
"""

import base64
import io
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from lerobot.datasets import LeRobotDataset
from lerobot.utils.utils import SuppressProgressBars
from PIL import Image

from vla_rlaif.checkpoint import write_whole
from vla_rlaif.dataset import Demonstrations
from vla_rlaif.lerobot_files import ACTION, IMAGES, INFO, NOTES, STATE, open_files, read_notes
from vla_rlaif.types import Episodes

FORMAT = 1
SMALLEST_VIDEO = 64  # pixels a side; with fewer, LeRobot's encoder (SVT-AV1) ends the process
Frame = dict[str, Any]


def save_demonstrations(
    folder: Path, demos: Demonstrations, about: Mapping[str, object], *, fps: int, video: bool = False
) -> None:
    """A new dataset; ``fps`` is the env's steps a second. ``video`` is lossy and needs a whole number of frames."""
    num = demos.mask.sum(axis=1).tolist()
    _require_frames(num)

    def frames(e: int) -> Iterator[Frame]:
        for step in range(num[e]):
            yield {
                **{IMAGES + camera: images[e, step] for camera, images in demos.images.items()},
                STATE: demos.state[e, step],
                ACTION: demos.action[e, step],
                **_outcome(step == num[e] - 1, bool(demos.success[e]), float(demos.success[e])),
            }

    todo = [(said, frames(e)) for e, said in enumerate(demos.instruction)]
    notes = {"format": FORMAT, "kind": "demonstrations", **about}
    _write(folder, todo, lambda saved: notes, fps=float(fps), video=video)


def append_episodes(
    folder: Path,
    episodes: Episodes,
    about: Mapping[str, object],
    *,
    fps: int,
    video: bool = False,
    reward: Float[np.ndarray, " N"] | None = None,
) -> list[str]:
    """Add one shard to a dataset, or begin one; returns the id of each episode, `shard:row`.

    ``fps`` is the env's steps a second. ``next.reward`` is the ``reward`` of an episode, or else its success, in its
    last frame and 0 before.
    """
    num, (_, decisions, chunk, _) = episodes.num_decisions.tolist(), episodes.action.shape
    _require_frames(num)
    live = np.arange(decisions) < episodes.num_decisions[:, None]
    assert (episodes.mask == live).all(), "an episode is live until it ends"
    trace = {k: {"dtype": v.dtype.str, "shape": list(v.shape[2:])} for k, v in sorted(episodes.trace.items())}
    notes = {"format": FORMAT, "kind": "episodes", "decisions": decisions, "chunk": chunk, "trace": trace, "shards": []}
    known = read_notes(folder) or notes
    if known | {"shards": []} != notes:
        raise ValueError(
            f"{folder} holds {_summary(known)}, these are {_summary(notes)}; keep the episodes of one env and policy "
            "in a folder."
        )
    given = episodes.success.astype(np.float32) if reward is None else reward
    todo = [(episodes.instruction[n], _rollout_frames(episodes, n, float(given[n]))) for n in range(len(num))]
    shards = lambda saved: [*known["shards"], {"episodes": saved, **about}]  # noqa: E731
    _write(folder, todo, lambda saved: {**known, "shards": shards(saved)}, fps=fps / chunk, video=video)
    return [f"{len(known['shards'])}:{row}" for row in range(len(num))]


def _rollout_frames(e: Episodes, n: int, reward: float) -> Iterator[Frame]:
    num = int(e.mask[n].sum())
    constant = {
        **{f"rollout.{k}": np.atleast_1d(getattr(e, k)[n]) for k in ("truth", "valid")},
        **{f"rollout.{k}": np.atleast_1d(getattr(e.starts, k)[n]) for k in ("seed", "group", "member")},
        "rollout.version": np.array([e.version]),
    }
    for t in range(num):
        is_last = t == num - 1
        yield {
            **{IMAGES + camera: images[n, t] for camera, images in e.images.items()},
            STATE: e.state[n, t],
            ACTION: e.action[n, t].reshape(-1),
            "next.state": e.state[n, t + 1],
            **_outcome(is_last, bool(e.success[n]), reward),
            "rollout.logp": e.logp[n, t],
            "rollout.executed": np.atleast_1d(e.executed[n, t]),
            **constant,
            **{f"rollout.trace.{k}": _text(v[n, t].tobytes()) for k, v in e.trace.items()},
            **{f"rollout.last.{k}": _png(v[n, num]) if is_last else "" for k, v in e.images.items()},
        }


def _outcome(is_last: bool, success: bool, reward: float) -> Frame:
    return {
        "next.reward": np.array([reward if is_last else 0.0], np.float32),
        "next.done": np.array([is_last]),
        "next.success": np.array([is_last and success]),
    }


def _write(
    folder: Path,
    episodes: Sequence[tuple[str, Iterator[Frame]]],
    notes: Callable[[int], Mapping[str, object]],
    *,
    fps: float,
    video: bool,
) -> None:
    """The frames through LeRobot's writer, and ``notes`` of how many episodes were saved."""
    if video and not fps.is_integer():
        raise ValueError(f"videos need a whole number of frames a second, not {fps}; store images or change the chunk.")
    first, rest = _peek(episodes)
    small = [k for k, v in first.items() if k.startswith(IMAGES) and min(v.shape[:2]) < SMALLEST_VIDEO]
    if video and small:
        raise ValueError(f"videos need {SMALLEST_VIDEO} pixels a side, {small[0]} has fewer; store images.")
    features = {k: _feature(v, video) for k, v in first.items()}
    with _recording(folder, features, fps, notes) as dataset, SuppressProgressBars():
        for task, frames in rest:
            for frame in frames:
                dataset.add_frame({**frame, "task": task})
            # In this process: a pool would fork one that may hold threads of JAX or of a renderer.
            with _same_priority():
                dataset.save_episode(parallel_encoding=False)


@contextmanager
def _same_priority() -> Iterator[None]:
    """LeRobot's video encoder, SVT-AV1, gives the thread that calls it real-time priority 99 if it is root's, for good
    (``svt_av1_enc_init_handle``). That thread and all processes that it starts later would starve everything else."""
    if sys.platform != "linux":
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def _peek(episodes: Sequence[tuple[str, Iterator[Frame]]]) -> tuple[Frame, Iterator[tuple[str, Iterator[Frame]]]]:
    """The first frame, and all episodes with it."""
    (task, frames), *others = episodes
    first = next(frames)
    return first, iter([(task, itertools.chain([first], frames)), *others])


@contextmanager
def _recording(
    folder: Path, features: Mapping[str, Any], fps: float, notes: Callable[[int], Mapping[str, object]]
) -> Iterator[LeRobotDataset]:
    """Episodes that were saved before the block fails are kept: without `finalize`, Parquet files have no end."""
    name = f"local/{folder.name}"
    if (folder / INFO).exists():
        _require_same(folder, features, fps)
        dataset = LeRobotDataset.resume(name, root=folder, video_backend="pyav")
    elif folder.exists():
        raise ValueError(f"{folder} exists and is no LeRobotDataset; choose a folder that does not exist yet.")
    else:
        has_video = any(f["dtype"] == "video" for f in features.values())
        rate: Any = int(fps) if fps.is_integer() else fps  # LeRobot asks for an int, and stores and uses any number
        dataset = LeRobotDataset.create(
            name, rate, dict(features), root=folder, use_videos=has_video, video_backend="pyav"
        )
    before = dataset.num_episodes
    write = lambda: write_whole(folder / NOTES, json.dumps(notes(dataset.num_episodes - before), indent=1).encode())  # noqa: E731
    try:
        write()  # what kind of dataset this is, even if the process is killed
        yield dataset
    finally:
        dataset.finalize()
        shutil.rmtree(folder / "images", ignore_errors=True)  # where images wait until their episode is saved
        write()


def _require_same(folder: Path, features: Mapping[str, Any], fps: float) -> None:
    files = open_files(folder)
    plain = lambda f: (f["dtype"], tuple(f["shape"]))  # noqa: E731
    found = {k: plain(f) for k, f in files.features.items() if k in features or not _is_automatic(k)}
    wanted = {k: plain(f) for k, f in features.items()}
    differ = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
    if differ:
        k = differ[0]
        raise ValueError(
            f"{folder} has other features than the new episodes ({', '.join(differ)}: {found.get(k)}, not "
            f"{wanted.get(k)}); choose another folder."
        )
    if files.fps != fps:
        raise ValueError(f"{folder} has {files.fps} frames a second, the new episodes {fps}; choose another folder.")


def _is_automatic(feature: str) -> bool:
    return feature in ("timestamp", "frame_index", "episode_index", "index", "task_index")


def _feature(value: Any, video: bool) -> dict[str, Any]:
    if isinstance(value, str):
        return {"dtype": "string", "shape": (1,), "names": None}
    if value.dtype == np.uint8 and value.ndim == 3:
        names = ["height", "width", "channels"]
        return {"dtype": "video" if video else "image", "shape": value.shape, "names": names}
    return {"dtype": str(value.dtype), "shape": value.shape, "names": None}


def _require_frames(num: Sequence[int]) -> None:
    empty = [row for row, frames in enumerate(num) if not frames]
    if empty:
        raise ValueError(f"episodes {empty} have no frame: LeRobot stores none without.")


def _summary(notes: Mapping[str, Any]) -> str:
    if notes["kind"] != "episodes":
        return str(notes["kind"])
    return f"episodes of {notes['decisions']} decisions of {notes['chunk']} actions with trace {notes['trace']}"


def _png(image: UInt8[np.ndarray, "height width 3"]) -> str:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return _text(buffer.getvalue())


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
