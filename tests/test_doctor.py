"""The checks of the machine: what passes, and that a failure comes with its remedy."""

import os

import pytest

from vla_rlaif import doctor
from vla_rlaif.cli import main

# How PyOpenGL finds its libraries: hiding them there is a machine without them.
WITHOUT_OPENGL = """
import ctypes, ctypes.util
load = ctypes.CDLL.__init__
def load_other(self, name, *args, **kwargs):
    if name and any(part in name for part in ("EGL", "OpenGL", "libGL", "OSMesa")):
        raise OSError(f"{name}: cannot open shared object file")
    load(self, name, *args, **kwargs)
ctypes.CDLL.__init__ = load_other
ctypes.util.find_library = lambda name: None
"""


@pytest.fixture
def enough(monkeypatch):
    """The test machine has the memory and disk of a workstation."""
    monkeypatch.setattr(doctor, "MEMORY_GB", 0)
    monkeypatch.setattr(doctor, "DISK_GB", 0)


@pytest.fixture
def no_opengl(monkeypatch, tmp_path):
    """New Python processes do not find OpenGL."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_OPENGL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("PYOPENGL_PLATFORM", raising=False)


def test_a_machine_that_has_all(enough, capsys):
    assert doctor.check("ray")
    lines = capsys.readouterr().out.splitlines()
    assert "ok   rendering ray: works" in lines
    assert sum(line.startswith("ok   extra") for line in lines) >= 2
    assert not any(line.startswith("FAIL") for line in lines)


def test_a_failing_renderer_is_named_with_its_remedy(enough, no_opengl, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["doctor", "--renderer", "egl"])
    assert exit.value.code == 1
    (failure,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL"))
    assert failure.startswith("FAIL rendering egl: ")
    assert "apt install libegl1 libgl1" in failure and "renderer: ray" in failure


def test_the_other_renderer_works_on_that_machine(enough, no_opengl):
    with pytest.raises(SystemExit) as exit:
        main(["doctor", "--renderer", "ray"])
    assert exit.value.code == 0


@pytest.mark.parametrize(("limit", "name"), [("MEMORY_GB", "memory"), ("DISK_GB", "disk")])
def test_too_little_room_fails(enough, monkeypatch, capsys, limit, name):
    monkeypatch.setattr(doctor, limit, 10**6)
    monkeypatch.setattr(doctor, "_rendering", lambda renderer: (True, "works"))
    assert not doctor.check("ray")
    assert any(line.startswith(f"FAIL {name}: ") for line in capsys.readouterr().out.splitlines())


def test_a_missing_extra_says_how_to_install_it(monkeypatch, enough, capsys):
    monkeypatch.setitem(doctor.EXTRAS, "torch", ("no_such_package",))
    monkeypatch.setattr(doctor, "_rendering", lambda renderer: (True, "works"))
    assert not doctor.check("ray")
    out = capsys.readouterr().out
    assert "FAIL extra torch: no_such_package not installed: pip install -c constraints.txt -e '.[torch]'" in out
