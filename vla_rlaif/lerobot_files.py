"""The files of a LeRobotDataset, format v3.0, as arrays: Parquet, PNG and MP4, read without a cache and row by row.

    meta/info.json  stats.json  tasks.parquet  episodes/*/*.parquet    data/*/*.parquet    videos/<key>/*/*.mp4

LeRobot's own reader turns numbers into float32 tensors; these are the stored ones. Only videos need LeRobot.

Axes: B rows (frames) of a batch, L frames of an episode.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image, UnidentifiedImageError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ModuleNotFoundError:
    raise ValueError("LeRobotDatasets need the extra lerobot: pip install 'vla_rlaif[lerobot]'.") from None

IMAGES = "observation.images."
STATE = "observation.state"
ACTION = "action"
INFO = Path("meta/info.json")
NOTES = Path("meta/vla_rlaif.json")  # ours: what the format has no place for
_BATCH = 64  # rows read at a time
_TIME_TOLERANCE = 1e-4  # seconds between a frame's time and the video's, LeRobot's default


@dataclass(frozen=True, kw_only=True)
class Files:
    """A whole dataset on disk: its footers were read and their counts add up."""

    folder: Path
    fps: float  # frames a second
    features: Mapping[str, Mapping[str, Any]]  # of info.json: dtype, shape, names
    lengths: Int[np.ndarray, " N"]  # frames of each episode
    tasks: Mapping[int, str]  # by task_index
    videos: Sequence[Mapping[str, Any]]  # of each episode: the columns videos/<key>/{chunk_index, file_index, ...}
    video_path: str | None  # a format string

    @property
    def num_episodes(self) -> int:
        return len(self.lengths)

    @property
    def cameras(self) -> dict[str, tuple[int, int]]:
        """Height and width in pixels, by feature."""
        found = {k: f for k, f in self.features.items() if f["dtype"] in ("image", "video")}
        return {k: _height_width(f["shape"], f.get("names")) for k, f in found.items()}


def open_files(folder: Path) -> Files:
    """Raises ValueError if ``folder`` is no LeRobotDataset, an old one, an empty one or a half-written one."""
    info = _info(folder)
    if info["total_episodes"] == 0:
        raise ValueError(f"{folder} has no episodes: nothing was saved to it. Record it again.")
    counts = {"meta/episodes": info["total_episodes"], "data": info["total_frames"]}
    for part, wanted in counts.items():
        found = sum(_num_rows(path, folder) for path in _parquet(folder, part))
        if found != wanted:
            raise _half_written(folder, f"{part} has {found} rows, meta/info.json says {wanted}")
    names = pq.read_schema(_parquet(folder, "meta/episodes")[0]).names
    columns = ["length", *(n for n in names if n.startswith("videos/"))]
    episodes = [row for path in _parquet(folder, "meta/episodes") for row in _table(path, columns).to_pylist()]
    files = Files(
        folder=folder,
        fps=float(info["fps"]),
        features=info["features"],
        lengths=np.array([e["length"] for e in episodes]),
        tasks=_tasks(folder),
        videos=episodes,
        video_path=info.get("video_path"),
    )
    for key in (k for k, f in files.features.items() if f["dtype"] == "video"):
        for path in {_video_file(files, key, e) for e in range(files.num_episodes)}:
            if not path.is_file():
                raise _half_written(folder, f"{path.relative_to(folder)} is missing")
    return files


def rows(
    files: Files, columns: Iterable[str], *, episodes: int | None = None
) -> Iterator[tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"], dict[str, np.ndarray]]]:
    """(episode, frame, values) of a few frames at a time, of the first ``episodes`` or all.

    An image column is "B height width 3", a string column " B" of objects, all others "B" and the feature's shape; a
    shape of (1,) stays an axis.
    """
    wanted = list(dict.fromkeys([*columns, "episode_index", "frame_index", "task_index"]))
    last = files.num_episodes if episodes is None else episodes
    for path in _parquet(files.folder, "data"):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH, columns=wanted):
                batch = batch.filter(pa.array(batch.column("episode_index").to_numpy() < last))
                if batch.num_rows:
                    values = {k: _values(batch.column(k), files.features[k], path) for k in wanted}
                    yield values["episode_index"][:, 0], values["frame_index"][:, 0], values


def whole_columns(files: Files, columns: Iterable[str]) -> dict[str, np.ndarray]:
    """Columns of numbers, of every frame: each a row, "B" and the feature's shape."""
    names = list(dict.fromkeys(columns))
    tables = [(path, _table(path, names)) for path in _parquet(files.folder, "data")]
    return {
        name: np.concatenate(
            [_values(chunk, files.features[name], path) for path, table in tables for chunk in table[name].chunks]
        )
        for name in names
    }


def episode_rows(files: Files, episode: int, columns: Iterable[str]) -> dict[str, np.ndarray]:
    """Columns of one episode's frames, as in ``rows``; row groups of other episodes are not read."""
    names = list(dict.fromkeys([*columns, "episode_index"]))
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for path in _parquet(files.folder, "data"):
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                if not _may_hold(file.metadata.row_group(group), episode):
                    continue
                for batch in file.iter_batches(_BATCH, row_groups=[group], columns=names):
                    batch = batch.filter(pa.array(batch.column("episode_index").to_numpy() == episode))
                    for name in names if batch.num_rows else ():
                        found[name].append(_values(batch.column(name), files.features[name], path))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _may_hold(group: pq.RowGroupMetaData, episode: int) -> bool:
    """By the statistics of the row group, if it has some."""
    columns = [group.column(number) for number in range(group.num_columns)]
    known = next(column.statistics for column in columns if column.path_in_schema == "episode_index")
    return known is None or not known.has_min_max or known.min <= episode <= known.max


def decode_video(files: Files, key: str, episode: int) -> UInt8[np.ndarray, "L height width 3"]:
    from lerobot.datasets.video_utils import decode_video_frames

    start = files.videos[episode][f"videos/{key}/from_timestamp"]
    times = [start + frame / files.fps for frame in range(files.lengths[episode])]
    path = _video_file(files, key, episode)
    frames = decode_video_frames(path, times, _TIME_TOLERANCE, backend="pyav", return_uint8=True)
    return frames.numpy().transpose(0, 2, 3, 1)


def decode_image(data: bytes, where: object) -> UInt8[np.ndarray, "height width 3"]:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{where} has an image that cannot be read: {error}. Record the dataset again.") from None


def read_notes(folder: Path) -> dict[str, Any] | None:
    """What ``lerobot_export`` wrote beside LeRobot's own files; None if something else recorded the dataset."""
    path = folder / NOTES
    return _json(path) if path.exists() else None


def _info(folder: Path) -> dict[str, Any]:
    path = folder / INFO
    if not path.exists():
        raise ValueError(f"{folder} is not a LeRobotDataset: it has no {INFO}.")
    info = _json(path)
    missing = {"codebase_version", "fps", "features", "total_episodes", "total_frames"} - info.keys()
    if missing:
        raise ValueError(f"{path} is damaged: it has no {', '.join(sorted(missing))}. Record the dataset again.")
    if not str(info["codebase_version"]).startswith("v3."):
        raise ValueError(
            f"{folder} has format {info['codebase_version']}, wanted v3.0; convert it with "
            "`python -m lerobot.scripts.convert_dataset_v21_to_v30`."
        )
    return info


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}. Record the dataset again.") from None


def _half_written(folder: Path, why: str) -> ValueError:
    return ValueError(
        f"{folder} is half-written: {why}. Whoever recorded it stopped before `finalize`; record it again, or restore "
        "a whole copy."
    )


def _parquet(folder: Path, part: str) -> list[Path]:
    return sorted((folder / part).glob("*/*.parquet"))


def _num_rows(path: Path, folder: Path) -> int:
    try:
        return pq.read_metadata(path).num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise _half_written(folder, f"{path.relative_to(folder)} has no end ({error})") from None


def _table(path: Path, columns: list[str] | None = None) -> pa.Table:
    with pq.ParquetFile(path) as file:
        return file.read(columns)


def _tasks(folder: Path) -> dict[int, str]:
    """The sentences are the index of a pandas table, which Parquet keeps as the column that is not ``task_index``."""
    path = folder / "meta/tasks.parquet"
    if not path.exists():
        raise _half_written(folder, "meta/tasks.parquet is missing")
    table = _table(path).to_pydict()
    sentences = next(values for name, values in table.items() if name != "task_index")
    return dict(zip(table["task_index"], sentences, strict=True))


def _video_file(files: Files, key: str, episode: int) -> Path:
    assert files.video_path is not None, "a dataset with video features names their files"
    row, part = files.videos[episode], f"videos/{key}/"
    name = files.video_path.format(
        video_key=key, chunk_index=row[f"{part}chunk_index"], file_index=row[f"{part}file_index"]
    )
    return files.folder / name


def _height_width(shape: Sequence[int], names: Sequence[str] | None) -> tuple[int, int]:
    """Channels come last if they are named last, as in LeRobot."""
    is_last = names is not None and names[2] in ("channel", "channels")
    height, width = shape[:2] if is_last else shape[1:]
    return height, width


def _values(column: pa.Array, feature: Mapping[str, Any], where: Path) -> np.ndarray:
    if feature["dtype"] == "image":
        return np.stack([decode_image(row["bytes"], where) for row in column.to_pylist()])
    if feature["dtype"] == "string":
        return np.array(column.to_pylist(), dtype=object)
    while True:  # datasets' multi-dimensional columns are extension types over nested lists
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        elif pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
            column = column.flatten()
        else:
            flat = column.to_numpy(zero_copy_only=False)
            return flat.astype(feature["dtype"], copy=False).reshape(-1, *feature["shape"])
