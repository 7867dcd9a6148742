"""Episodes as files for other programs: CSV and Parquet tables, MP4 and GIF videos, Rerun recordings.

Axes as in source.py; M episodes that are exported.
"""

import csv
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from vla_rlaif.inspect.source import Episode, Source, load_episode
from vla_rlaif.inspect.table import EpisodeTable
from vla_rlaif.inspect.video import FPS, HOLD, captioned, mosaic

SUFFIXES = (".csv", ".parquet", ".mp4", ".gif", ".rrd")
MAX_TILES = 16  # episodes side by side in a video


def export(source: Source, rows: Int[np.ndarray, " M"], to: Path, *, fps: float = FPS) -> Path:
    """Some episodes of a source; the suffix of ``to`` is the format. Returns ``to``.

    .csv .parquet  a row an episode          .rrd  all of them: frames, actions, log-probs, progress
    .mp4 .gif      the episodes side by side, at ``fps`` frames a second; 16 at most

    Raises ValueError for another suffix, no episode or too many.
    """
    if to.suffix not in SUFFIXES:
        raise ValueError(f"{to} has the suffix {to.suffix!r}; exports are {', '.join(SUFFIXES)}.")
    if not len(rows):
        raise ValueError(f"no episode of {source.path} passes the filter; there is nothing to export.")
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(f"{to.stem}.part{to.suffix}")  # a reader never sees half a file
    table = source.table
    try:
        if to.suffix == ".csv":
            _write_csv(part, table.taken(rows))
        elif to.suffix == ".parquet":
            _write_parquet(part, table.taken(rows))
        elif to.suffix == ".rrd":
            from vla_rlaif.inspect.rerun import write_rerun

            write_rerun(part, _episodes(source, table, rows), name=source.path.name)
        else:
            _write_video(part, source, table, rows, fps)
        part.replace(to)
    finally:
        part.unlink(missing_ok=True)
    return to


def columns_of(table: EpisodeTable) -> dict[str, list[Any]]:
    """Every column, derived ones too, as Python values; what is not known is None."""
    whole = {**vars(table), "spread": table.spread, "disagreement": table.disagreement}
    names = [*EpisodeTable.__dataclass_fields__, "spread", "disagreement"]
    return {name: [_plain(value) for value in whole[name]] for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value


def _write_csv(path: Path, table: EpisodeTable) -> None:
    columns = columns_of(table)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _write_parquet(path: Path, table: EpisodeTable) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns_of(table)), path)


def _episodes(source: Source, table: EpisodeTable, rows: Int[np.ndarray, " M"]) -> Iterator[Episode]:
    """One at a time: all of them may not fit into memory."""
    for row in rows.tolist():
        yield load_episode(source, table.id[row])


def _write_video(path: Path, source: Source, table: EpisodeTable, rows: Int[np.ndarray, " M"], fps: float) -> None:
    if len(rows) > MAX_TILES:
        raise ValueError(
            f"{len(rows)} episodes pass the filter, a video shows {MAX_TILES} at most; narrow the filter, or export "
            ".rrd, which takes all."
        )
    frames = mosaic([captioned(episode) for episode in _episodes(source, table, rows)])
    if path.suffix == ".gif":
        _write_gif(path, frames, fps)
    else:
        _write_mp4(path, frames, fps)


def _write_gif(path: Path, frames: UInt8[np.ndarray, "F height width 3"], fps: float) -> None:
    """One palette for all frames: with one a frame, colours flicker."""
    some = Image.fromarray(frames[:: max(1, len(frames) // 8)].reshape(-1, *frames.shape[2:]))
    palette = some.quantize(256, Image.Quantize.MEDIANCUT)
    images = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [round(1000 / fps)] * (len(images) - 1) + [round(1000 * HOLD / fps)]
    images[0].save(path, "GIF", save_all=True, append_images=images[1:], duration=times, loop=0)


def _write_mp4(path: Path, frames: UInt8[np.ndarray, "F height width 3"], fps: float) -> None:
    """H.264, which every browser plays."""
    import av

    held = np.concatenate([frames, np.repeat(frames[-1:], HOLD - 1, axis=0)])
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width, stream.pix_fmt = held.shape[1], held.shape[2], "yuv420p"
        for frame in held:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
