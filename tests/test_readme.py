"""Every example of the README runs as written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def files():
    """Code blocks whose first line names a file: name -> text."""
    blocks = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", README.read_text(), re.DOTALL)
    return dict(blocks)


@pytest.mark.parametrize("name", ["my_reward", "my_env", "my_policy"])
def test_example_trains(tmp_path, name):
    examples = files()
    for file in (f"{name}.py", f"{name}.yaml"):
        (tmp_path / file).write_text(examples[file])
    done = subprocess.run(
        [sys.executable, "-m", "vla_rlaif", "train", f"{name}.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / f"{name}-seed0"
    result = json.loads((run / "result.json").read_text())
    assert result["success_after"] > result["success_before"] + 0.2
    assert (run / "report.html").stat().st_size > 10_000
