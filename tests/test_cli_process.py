"""The command in a process of its own: where a package is missing, and where nobody reads on."""

import subprocess
import sys

import pytest
import yaml

from vla_rlaif.cli import main

POINT = {
    "env": {"type": "point_reach", "num_envs": 8},
    "policy": {"type": "gaussian", "backend": "torch"},
    "reward": {"type": "pixel_distance"},
    "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2},
    "loop": {"steps": 1, "validation_episodes": 8},
    "evaluate": {"episodes": 8, "clips": 1},
}
WITHOUT_TORCH = """
import importlib.util, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)
sys.meta_path.insert(0, Absent())
from vla_rlaif.cli import main
main()
"""


@pytest.fixture(scope="module")
def point(tmp_path_factory):
    path = tmp_path_factory.mktemp("point") / "point.yaml"
    path.write_text(yaml.safe_dump({**POINT, "out": str(path.parent / "run")}))
    return path


@pytest.fixture(scope="module")
def finished(point):
    """(config, run directory)."""
    with pytest.raises(SystemExit, match="0"):
        main(["train", str(point)])
    return point, point.parent / "run"


def test_a_reader_that_has_seen_enough_is_no_fault(point):
    code = "import sys; sys.stdout.write('x'); sys.stdout.flush(); from vla_rlaif.cli import main; main()"
    command = [sys.executable, "-c", code, "plan", str(point)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("train", "policy.type gaussian needs the extra torch: torch not installed"),
        ("evaluate", "this needs the package torch, which is not installed"),
    ],
)
def test_a_missing_extra_is_named_with_its_remedy(point, finished, tmp_path, verb, words):
    rest = ["--out", str(tmp_path / "run")] if verb == "train" else ["--policy", str(finished[1] / "best")]
    command = [sys.executable, "-c", WITHOUT_TORCH, verb, str(point), *rest]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and words in done.stderr
    assert "pip install -c constraints.txt -e '.[torch]'" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
