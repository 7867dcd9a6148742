"""Datasets of the Hugging Face Hub, through LeRobot. What it keeps of them is taken where the Hub cannot be reached."""

from pathlib import Path

import httpx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from lerobot.datasets import CODEBASE_VERSION, LeRobotDataset
from lerobot.datasets.utils import CompatibilityError
from lerobot.utils.constants import HF_LEROBOT_HUB_CACHE

_FAILURES = (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.HTTPError, CompatibilityError)


def download(name: str) -> Path:
    """The folder of dataset ``name``, `owner/dataset`: recorded here under that name, or downloaded."""
    try:
        return Path(LeRobotDataset(name, video_backend="pyav").root)
    except _FAILURES as error:
        if (kept := _kept(name)) is not None:
            return kept
        raise ValueError(
            f"{name} is no folder here, and the Hub did not give a dataset of that name ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}). Check the name and the connection, or pass the folder of a copy."
        ) from None


def _kept(name: str) -> Path | None:
    where = {"repo_type": "dataset", "revision": CODEBASE_VERSION, "cache_dir": HF_LEROBOT_HUB_CACHE}
    try:
        return Path(snapshot_download(name, **where, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
