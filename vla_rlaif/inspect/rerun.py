"""Episodes as a Rerun recording (https://rerun.io): the only module that imports rerun.

    <episode>/camera/<name>  <episode>/action/<dim>  <episode>/logp  <episode>/progress  <episode>/about

Every episode begins at frame 0 of the timeline "frame", so that they play side by side. Axes as in source.py.
"""

import io
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import rerun as rr
from jaxtyping import UInt8
from PIL import Image

from vla_rlaif.inspect.source import Episode


def write_rerun(path: Path, episodes: Iterable[Episode], *, name: str) -> None:
    """Writes while it reads: one episode is held at a time."""
    recording = rr.RecordingStream(f"vla_rlaif {name}")
    recording.save(path)
    for episode in episodes:
        _log(recording, episode, f"episode_{episode.id.replace(':', '_')}")
    recording.flush()
    recording.disconnect()


def _log(recording: rr.RecordingStream, episode: Episode, root: str) -> None:
    numbers = episode.numbers
    recording.log(f"{root}/about", rr.TextDocument(_about(episode), media_type="text/markdown"), static=True)
    for camera, frames in episode.frames.items():
        for frame, image in enumerate(frames):
            recording.set_time("frame", sequence=frame)
            recording.log(f"{root}/camera/{camera}", rr.EncodedImage(contents=_png(image), media_type="image/png"))
    for decision in range(len(numbers.action)):
        recording.set_time("frame", sequence=decision)
        for dim, value in enumerate(numbers.action[decision, 0].tolist()):  # the first of the chunk
            recording.log(f"{root}/action/{dim}", rr.Scalars(value))
        if numbers.logp.shape[1]:
            recording.log(f"{root}/logp", rr.Scalars(float(numbers.logp[decision].sum())))
    if numbers.progress is not None:
        for frame, value in enumerate(numbers.progress.tolist()):
            recording.set_time("frame", sequence=frame)
            if math.isfinite(value):
                recording.log(f"{root}/progress", rr.Scalars(value))


def _about(episode: Episode) -> str:
    about = episode.about
    known = {
        "instruction": about.instruction[0],
        "success": about.success[0],
        "reward": about.reward[0],
        "advantage": about.advantage[0],
        "ground-truth return": about.truth[0],
        "step": about.step[0],
        "group": about.group[0],
        "weights version": about.version[0],
        "start seed": about.seed[0],
    }
    return "\n".join(f"- {name}: {value}" for name, value in known.items())


def _png(image: UInt8[np.ndarray, "height width 3"]) -> bytes:
    data = io.BytesIO()
    Image.fromarray(image).save(data, "PNG")
    return data.getvalue()
