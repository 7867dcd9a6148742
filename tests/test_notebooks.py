"""Every notebook runs, and is committed without outputs."""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the Jupyter client's own event loop
def test_notebook_runs(tmp_path, path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "strip the outputs before committing"
    (tmp_path / "configs").symlink_to(path.parents[1] / "configs")
    (tmp_path / "ipython").mkdir()
    os.environ.setdefault("IPYTHONDIR", str(tmp_path / "ipython"))
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
