"""The groups of a run that are kept for looking at, written as it trains. ``vla_rlaif.inspect`` reads them.

    episodes/index.jsonl        one line a recorded step: all that a list of episodes shows
    episodes/step-000010.zip    numbers/<name>.npy and frames/<camera>/<place>.webp (see local_page/sheets.py)

A step's file comes first and whole, then its line; a resumed run drops what it will play again in the opposite order.
So whoever reads the index finds every file that it names.

Axes: N kept episodes, F frames.
"""

import io
import json
import math
import os
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image

from vla_rlaif.checkpoint import write_whole
from vla_rlaif.interfaces import FrameReward
from vla_rlaif.local_page.sheets import encode_sheet
from vla_rlaif.record_config import RecordConfig
from vla_rlaif.rollout import take
from vla_rlaif.types import Episodes

FORMAT = 1
INDEX = "index.jsonl"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Some whole groups of a step, as they were judged. Row n is the episode ``<step>:<row[n]>``, as in labels."""

    episodes: Episodes  # without traces
    row: Int[np.ndarray, " N"]  # among all episodes of the step
    reward: Float[np.ndarray, " N"]  # NaN: unscorable
    advantage: Float[np.ndarray, " N"]
    progress: Float[np.ndarray, "N F"] | None


def choose(
    config: RecordConfig,
    *,
    seed: int,
    step: int,
    episodes: Episodes,
    reward: Float[np.ndarray, " N"],
    advantage: Float[np.ndarray, " N"],
    judge: object,
) -> Recorded | None:
    """What is kept of a step; None of most. Groups are drawn by the run's seed and the step alone, so they show what is
    common and not what is remarkable. ``judge`` is the reward model that gave ``reward``."""
    if not config.every or step % config.every:
        return None
    ids = np.unique(episodes.starts.group)
    drawn = np.random.default_rng((seed, step)).permutation(ids)[: config.groups]
    row = np.flatnonzero(np.isin(episodes.starts.group, drawn))
    kept = take(replace(episodes, trace={}), row)
    progress = judge.progress(kept) if isinstance(judge, FrameReward) and "progress" in judge.heads else None
    images = {camera: _scaled(frames, config.size) for camera, frames in kept.images.items()}
    return Recorded(
        episodes=replace(kept, images=images),
        row=row,
        reward=reward[row],
        advantage=advantage[row],
        progress=progress,
    )


class Recording:
    """The recorded steps of one run. Steps only grow; a resumed run rewinds first."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._index = folder, folder / INDEX

    def write(self, step: int, recorded: Recorded) -> None:
        name = f"step-{step:06d}.zip"
        write_whole(self._folder / name, _shard(recorded))
        line = json.dumps({"format": FORMAT, "step": step, "file": name, **_columns(recorded)}, allow_nan=False) + "\n"
        with self._index.open("a", encoding="ascii") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def rewind(self, step: int) -> None:
        """Forget ``step`` and all later ones, and a line that a crash has cut short."""
        if not self._index.exists():
            return
        lines = self._index.read_text(encoding="ascii").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step]
        if len(kept) < len(lines):
            write_whole(self._index, "".join(kept).encode())
        named = {json.loads(line)["file"] for line in kept}
        for path in self._folder.glob("step-*.zip"):
            if path.name not in named:
                path.unlink()


def _columns(recorded: Recorded) -> dict[str, Any]:
    """What the index says of the episodes, each a column of as many rows."""
    e = recorded.episodes
    return {
        "version": e.version,
        "cameras": {camera: list(images.shape[2:4]) for camera, images in e.images.items()},
        "row": recorded.row.tolist(),
        "group": e.starts.group.tolist(),
        "member": e.starts.member.tolist(),
        "seed": e.starts.seed.tolist(),
        "instruction": list(e.instruction),
        "reward": _numbers(recorded.reward),
        "advantage": _numbers(recorded.advantage),
        "success": e.success.tolist(),
        "truth": _numbers(e.truth),
        "valid": e.valid.tolist(),
        "decisions": e.num_decisions.tolist(),
    }


def _numbers(values: Float[np.ndarray, " N"]) -> list[float | None]:
    """JSON has no NaN."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _shard(recorded: Recorded) -> bytes:
    e, buffer = recorded.episodes, io.BytesIO()
    numbers = {"state": e.state, "action": e.action, "logp": e.logp, "executed": e.executed, "mask": e.mask}
    if recorded.progress is not None:
        numbers["progress"] = recorded.progress
    with zipfile.ZipFile(buffer, "w") as file:
        for name, values in numbers.items():
            file.writestr(f"numbers/{name}.npy", _npy(values), zipfile.ZIP_DEFLATED)
        for camera, images in e.images.items():
            for place, num in enumerate(e.num_decisions.tolist()):
                sheet = encode_sheet(images[place, : num + 1])  # frames after the end repeat the last
                file.writestr(f"frames/{camera}/{place}.webp", sheet, zipfile.ZIP_STORED)
    return buffer.getvalue()


def _npy(values: np.ndarray) -> bytes:
    data = io.BytesIO()
    np.lib.format.write_array(data, np.asarray(values, order="C"), allow_pickle=False)
    return data.getvalue()


def _scaled(
    frames: UInt8[np.ndarray, "N F height width 3"], size: int
) -> UInt8[np.ndarray, "N F small_height small_width 3"]:
    num, steps, height, width, _ = frames.shape
    if max(height, width) <= size:
        return frames
    ratio = size / max(height, width)
    shape = max(1, round(width * ratio)), max(1, round(height * ratio))
    small = [
        np.asarray(Image.fromarray(frame).resize(shape, Image.Resampling.BOX))
        for frame in frames.reshape(-1, height, width, 3)
    ]
    return np.stack(small).reshape(num, steps, shape[1], shape[0], 3)
