"""Episodes and demonstrations on disk: compressed .npz shards (never pickled) and a manifest that names them.

A LeRobotDataset is read here too, and written by ``lerobot_export``.

Axes: N episodes, T decisions, F frames; E demonstrations, L recorded env steps, H chunk.
"""

import io
import json
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, UInt8

from vla_rlaif.checkpoint import write_whole
from vla_rlaif.rollout import frames_at
from vla_rlaif.types import Episodes, Observation, Starts, under

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """E demonstrations of at most L env steps. Frame l is seen before action l."""

    images: Mapping[str, UInt8[np.ndarray, "E L height width 3"]]
    state: Float[np.ndarray, "E L P"]
    instruction: tuple[str, ...]  # E
    action: Float[np.ndarray, "E L A"]  # what the demonstrator chose, without the execution noise
    mask: Bool[np.ndarray, "E L"]  # the step belongs to the demonstration
    success: Bool[np.ndarray, " E"]
    is_end_seen: bool = False  # frame l is there for the l behind the last action, too: what the last action led to

    def samples(self, chunk: int, window: int = 1) -> tuple[Observation, Float[np.ndarray, "D H A"]]:
        """Every recorded step with the chunk of H actions that follows; the last action is repeated past the end.

        The frames of a window are a chunk apart, as they are when the policy acts.
        """
        e, step = np.nonzero(self.mask)
        last = self.mask.sum(axis=1) - 1
        index = np.minimum(step[:, None] + np.arange(chunk), last[e][:, None])
        obs = frames_at(self.images, self.state, self.instruction, e, step, window, stride=chunk)
        return obs, self.action[e[:, None], index]


def save_demonstrations(folder: Path, demos: Demonstrations, about: Mapping[str, object]) -> None:
    flat = {f"images/{k}": v for k, v in demos.images.items()}
    flat |= {k: getattr(demos, k) for k in ("state", "action", "mask", "success")}
    about = {"kind": "demonstrations", "is_end_seen": demos.is_end_seen, **about}
    _write(folder, "demonstrations", 0, flat, demos.instruction, about)


def load_demonstrations(folder: Path) -> Demonstrations:
    if format_of(folder) == "lerobot":
        from vla_rlaif.lerobot_import import read_demonstrations

        return read_demonstrations(folder)
    shards = list(_read(folder, "demonstrations"))
    merged = {k: np.concatenate([arrays[k] for arrays, _ in shards]) for k in shards[0][0]}
    cameras = [k for k in merged if k.startswith("images/")]
    return Demonstrations(
        images={k.removeprefix("images/"): merged.pop(k) for k in cameras},
        instruction=tuple(s for _, sentences in shards for s in sentences),
        is_end_seen=bool(_manifest(folder).get("is_end_seen", False)),  # folders made by hand need not say
        **merged,
    )


def format_of(folder: Path) -> Literal["npz", "lerobot"] | None:
    """None: there is no dataset (yet)."""
    if (folder / "manifest.json").exists():
        return "npz"
    return "lerobot" if (folder / "meta/info.json").exists() else None


def num_episodes(folder: Path) -> int:
    """How many episodes the shards hold; 0 if there is no dataset yet."""
    if format_of(folder) == "lerobot":
        from vla_rlaif.lerobot_files import open_files

        return open_files(folder).num_episodes
    if not (folder / "manifest.json").exists():
        return 0
    return sum(len(arrays["success"]) for arrays, _ in _read(folder, "episodes", ("success", "instruction")))


def kind_of(folder: Path) -> str:
    """Episodes or demonstrations."""
    if format_of(folder) == "lerobot":
        from vla_rlaif import lerobot_import

        return lerobot_import.kind_of(folder)
    return str(_manifest(folder).get("kind"))


def require_kind(folder: Path, kind: str) -> None:
    """Raise ValueError if ``folder`` already holds another kind of dataset, which a new shard would hide."""
    if format_of(folder) is not None and (found := kind_of(folder)) != kind:
        raise ValueError(f"{folder} already holds {found}; choose another folder for {kind}.")


def append_episodes(folder: Path, episodes: Episodes, about: Mapping[str, object]) -> list[str]:
    """Add one shard; returns the id of each episode, `shard:row`."""
    shard = num_shards(folder)
    flat = flattened(episodes)
    _write(folder, "episodes", shard, flat, episodes.instruction, {"kind": "episodes", **about})
    return [f"{shard}:{row}" for row in range(len(episodes.success))]


def flattened(episodes: Episodes) -> dict[str, np.ndarray]:
    """All of them but the instructions, as arrays by name; ``episodes_of`` takes them back."""
    e = episodes
    flat = {f"images/{k}": v for k, v in e.images.items()} | {f"trace/{k}": v for k, v in e.trace.items()}
    flat |= {k: getattr(e, k) for k in ("state", "action", "logp", "mask", "executed", "success", "truth", "valid")}
    flat |= {f"starts/{k}": getattr(e.starts, k) for k in ("seed", "group", "member")}
    return flat | {"version": np.array(e.version)}


def to_arrays(episodes: Episodes) -> dict[str, np.ndarray]:
    """All of them as arrays by name, for a checkpoint; ``from_arrays`` takes them back."""
    said = np.frombuffer(json.dumps(episodes.instruction).encode(), np.uint8).copy()
    return {**flattened(episodes), "instruction": said}


def from_arrays(arrays: Mapping[str, np.ndarray]) -> Episodes:
    rest = {name: value for name, value in arrays.items() if name != "instruction"}
    return episodes_of(rest, json.loads(arrays["instruction"].tobytes()))


def load_episodes(folder: Path) -> list[tuple[list[str], Episodes]]:
    """All shards with the ids of their episodes."""
    if format_of(folder) == "lerobot":
        from vla_rlaif.lerobot_import import read_episodes

        return read_episodes(folder)
    loaded = []
    for shard, (arrays, instruction) in enumerate(_read(folder, "episodes")):
        episodes = episodes_of(arrays, instruction)
        loaded.append(([f"{shard}:{row}" for row in range(len(episodes.success))], episodes))
    return loaded


def num_shards(folder: Path) -> int:
    """How many shards a folder of episodes has; 0 if nothing was appended yet."""
    return len(_manifest(folder)["shards"]) if (folder / "manifest.json").exists() else 0


def read_shard(folder: Path, index: int) -> Episodes:
    arrays, instruction = _read_file(folder / _manifest(folder)["shards"][index])
    return episodes_of(arrays, instruction)


def episodes_of(arrays: Mapping[str, np.ndarray], instruction: Sequence[str]) -> Episodes:
    return Episodes(
        images=under("images/", arrays),
        trace=under("trace/", arrays),
        starts=Starts(**under("starts/", arrays)),
        instruction=tuple(instruction),
        version=int(arrays["version"]),
        **{k: v for k, v in arrays.items() if "/" not in k and k != "version"},
    )


def _write(
    folder: Path,
    kind: str,
    shard: int,
    arrays: Mapping[str, np.ndarray],
    instruction: tuple[str, ...],
    about: Mapping[str, object],
) -> None:
    """The shard first, then the manifest that names it; both appear whole or not at all."""
    require_kind(folder, kind)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{**arrays, "instruction": np.array(instruction)})
    name = f"{kind}-{shard:05d}.npz"
    write_whole(folder / name, buffer.getvalue())
    shards = _manifest(folder)["shards"] if shard else []
    manifest = {"format": FORMAT, **about, "shards": [*shards, name]}
    write_whole(folder / "manifest.json", json.dumps(manifest, indent=1).encode())


def _manifest(folder: Path) -> dict:
    path = folder / "manifest.json"
    if not path.exists():
        raise ValueError(f"{folder} is not a dataset: it has no manifest.json. `vla-rlaif collect` makes one.")
    try:
        manifest = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}. Collect the dataset again.") from None
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} has format {manifest.get('format')!r}; this version reads {FORMAT}.")
    return manifest


def _read(
    folder: Path, kind: str, only: Collection[str] | None = None
) -> Iterator[tuple[dict[str, np.ndarray], list[str]]]:
    """The arrays of each shard (all of them, or ``only`` some) and its sentences."""
    manifest = _manifest(folder)
    if manifest.get("kind") != kind:
        raise ValueError(f"{folder} holds {manifest.get('kind')}, wanted {kind}.")
    for name in manifest["shards"]:
        yield _read_file(folder / name, only)


def _read_file(path: Path, only: Collection[str] | None = None) -> tuple[dict[str, np.ndarray], list[str]]:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {k: file[k] for k in file.files if only is None or k in only}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is damaged or missing: {error}. Collect the dataset again.") from None
    return arrays, arrays.pop("instruction").tolist()
