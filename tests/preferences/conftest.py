"""One tiny random judge for all tests of this folder."""

from pathlib import Path

import pytest
from synthetic import SPEC

from vla_rlaif.preferences.tiny_judge import write_tiny_judge


@pytest.fixture(scope="session")
def judge_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder: a Qwen3-VL with random weights, for the images of ``synthetic``."""
    folder = tmp_path_factory.mktemp("judge") / "tiny"
    write_tiny_judge(folder, SPEC)
    return folder
