"""Every notebook runs at a small size, and is committed without outputs. `make docs` runs them at their own sizes."""

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))
import notebook_pages  # noqa: E402  # pyright: ignore[reportMissingImports]

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL: dict[str, dict[str, Any]] = {
    "01_inspect_trajectories": {"RUN": "runs/none", "SMALL_STEPS": 2},
    "02_learn_a_reward": {"EPISODES": 96, "LABELS": 60, "FIT_STEPS": 40},
    "03_grpo_on_octo": {
        "NUM_ENVS": 16,
        "STEPS": 2,
        "IMITATION_STEPS": 2,
        "DEMONSTRATIONS": 16,
        "BATCH": 32,
        "LABELS": 24,
        "TEST_EPISODES": 16,
    },
    "04_own_reward_on_octo_small": {"NUM_ENVS": 4, "STEPS": 1, "IMAGE_SIZE": 64, "TEST_EPISODES": 4},
    "05_the_pools_week": {"DAYS": 2},
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the Jupyter client's own event loop
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path):
    cells = nbformat.read(path, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), "strip the outputs first"
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "ipython").mkdir()
    notebook = notebook_pages.execute(path, SMALL[path.stem], where=tmp_path)
    text, pictures = notebook_pages.page(notebook, path.stem)
    shown = len(pictures) + text.count('class="output"')
    assert shown >= 1, "it shows nothing"
    assert not re.search(r"Traceback|Error:", text)


def test_a_parameter_that_the_notebook_does_not_set_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="does not set STEPZ"):
        notebook_pages.execute(NOTEBOOKS[0], {"STEPZ": 1}, where=tmp_path)
