"""EGL's list of GPUs against CUDA's."""

import json
import subprocess
import sys

import pytest

from vla_rlaif.envs import egl_devices
from vla_rlaif.envs.egl_devices import index_of

UUIDS = ("GPU-aa11", "GPU-bb22", "GPU-bb33")


@pytest.mark.parametrize(
    ("gpu", "cuda_indices", "expected"),
    [
        ("0", [0, 1, 2, None], 0),
        ("0", [2, 0, 1], 1),  # EGL counts in another order
        ("2", [None, 1, 2, 0], 2),  # and has a software renderer in its list
        ("3", [0, 1, 2], None),
        ("GPU-aa11", [1, 0], 1),
        ("GPU-bb2", [2, 1, 0], 1),  # CUDA takes any unique beginning
        ("GPU-bb", [0, 1, 2], None),
        ("MIG-5", [0, 1, 2], None),
        ("0", [], None),
    ],
)
def test_the_egl_index_of_a_gpu(gpu: str, cuda_indices: list[int | None], expected: int | None) -> None:
    assert index_of(gpu, cuda_indices, UUIDS) == expected


def test_the_list_of_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, egl_devices.__file__], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        assert "libEGL.so.1" in done.stderr  # a machine without EGL
    else:
        assert all(index is None or index >= 0 for index in json.loads(done.stdout))
