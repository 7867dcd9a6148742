"""The checks of the machine: what passes, and that a failure comes with its remedy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vla_rlaif import doctor, doctor_machine, doctor_probes
from vla_rlaif.cli import main
from vla_rlaif.config import parse_config
from vla_rlaif.doctor import Check, Options, check, checks, line, mismatches, remedy
from vla_rlaif.doctor_machine import Finding, available_memory, cpu, disk, open_files, shared_memory
from vla_rlaif.doctor_probes import attempt, run_env, suite
from vla_rlaif.manifest import manifest

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
WORKS = Finding(passed=True, found="works")


@pytest.fixture
def enough(monkeypatch):
    """The test machine has the memory and disk of a workstation."""
    monkeypatch.setattr(doctor_machine, "MEMORY_GB", 0)
    monkeypatch.setattr(doctor_machine, "DISK_GB", 0)


@pytest.fixture
def no_opengl(monkeypatch, tmp_path):
    """New Python processes do not find OpenGL."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_OPENGL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for name in ("PYOPENGL_PLATFORM", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def drawing(monkeypatch):
    """Rendering works, without a process that tries it."""
    monkeypatch.setattr(doctor, "rendering", lambda renderer: WORKS)


def test_a_machine_that_has_all(enough, capsys):
    assert check(Options(renderer="ray"))
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


@pytest.mark.parametrize("renderer", ["egl", "ray"])
def test_opengl_that_a_variable_asks_for_is_named_too(enough, no_opengl, monkeypatch, renderer):
    """MuJoCo loads it when it is imported."""
    monkeypatch.setenv("MUJOCO_GL", "egl")
    for found in (doctor_probes.rendering(renderer), suite("tabletop", renderer)):
        assert not found.passed
        assert "apt install libegl1 libgl1" in found.found and "if MUJOCO_GL is not set" in found.found


@pytest.mark.parametrize(("limit", "name"), [("MEMORY_GB", "memory"), ("DISK_GB", "disk")])
def test_too_little_room_fails(enough, drawing, monkeypatch, capsys, limit, name):
    monkeypatch.setattr(doctor_machine, limit, 10**6)
    assert not check(Options(renderer="ray"))
    (failure,) = (text for text in capsys.readouterr().out.splitlines() if text.startswith("FAIL"))
    assert failure.startswith(f"FAIL {name}: ") and "1000000 GB" in failure


def test_a_missing_extra_says_how_to_install_it(monkeypatch, enough, drawing, capsys):
    monkeypatch.setitem(doctor.EXTRAS, "torch", ("no_such_package",))
    assert not check(Options(renderer="ray"))
    out = capsys.readouterr().out
    assert "FAIL extra torch: no_such_package not installed: pip install -c constraints.txt -e '.[torch]'" in out


def test_json_says_the_same_to_programs(enough, drawing, capsys, monkeypatch):
    monkeypatch.setitem(doctor.EXTRAS, "warp", ("no_such_package",))
    with pytest.raises(SystemExit) as exit:
        main(["doctor", "--renderer", "ray", "--json"])
    assert exit.value.code == 0  # warp is not needed
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    named = {one["name"]: one for one in found["checks"]}
    assert named["rendering ray"] == {"name": "rendering ray", "needed": True, **vars(WORKS)}
    assert named["extra warp"] == {
        "name": "extra warp",
        "needed": False,
        "passed": False,
        "found": "no_such_package not installed",
        "remedy": "pip install -c constraints.txt -e '.[warp]'",
    }
    assert set(named) == {one.name for one in checks(Options(renderer="ray"))}


def test_marks():
    mark = lambda passed, needed: line(  # noqa: E731
        Check(name="x", run=lambda: WORKS, is_needed=needed), Finding(passed=passed, found="y", remedy="z")
    )
    assert mark(True, True) == "ok   x: y"
    assert mark(False, True) == "FAIL x: y: z"
    assert mark(False, False) == mark(None, True) == "-    x: y: z"


def test_every_package_of_an_extra_has_a_remedy():
    assert remedy("rerun") == "pip install -c constraints.txt -e '.[inspect]'"
    assert remedy("wandb") == "pip install wandb"
    assert remedy("antigravity") is None


def test_versions_out_of_range_are_named():
    from importlib.metadata import version

    numpy = version("numpy")
    wanted = ["numpy<1; extra == 'x'", "jaxtyping", "no_such_package>1", "Pillow>=1"]
    assert mismatches(wanted) == [f"numpy {numpy}, wanted <1"]


def group(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return folder


def test_the_containers_limits_count(tmp_path, monkeypatch):
    """12 GiB are free on the machine; the container may have 8, of which 6 are in use and 1 of those is page cache."""
    table = tmp_path / "meminfo"
    table.write_text(f"MemTotal: 9 kB\nMemAvailable: {12 * 2**20} kB\n")
    gib = 2**30
    limits = group(tmp_path, memory_max=str(8 * gib), memory_current=str(6 * gib), memory_stat=f"inactive_file {gib}\n")
    assert available_memory(limits, table) == (3.0, " (a limit of the container)")
    group(tmp_path, memory_max="max\n")
    assert available_memory(limits, table) == (12.0, "")
    monkeypatch.setattr(doctor_machine, "GROUP", group(tmp_path, cpu_max="50000 100000\n"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = cpu()
    assert found.passed is False and found.found.startswith("0.5 cores (a limit of the container")
    assert "OMP_NUM_THREADS" in found.remedy
    group(tmp_path, cpu_max="max 100000\n")
    assert cpu().passed


def test_limits_of_the_system(tmp_path, monkeypatch):
    assert shared_memory(tmp_path / "none").passed is None
    monkeypatch.setattr(doctor_machine, "SHARED_GB", 10**6)
    assert shared_memory(tmp_path).passed is False and "--shm-size" in shared_memory(tmp_path).remedy
    monkeypatch.setattr(doctor_machine, "OPEN_FILES", 10**9)
    assert open_files().passed is False and "ulimit -n" in open_files().remedy
    assert disk(tmp_path).found.endswith(f"free at {tmp_path}")


def nvidia(folder: Path, monkeypatch, text: str, code: int = 0) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_gpus_are_what_the_driver_lists(tmp_path, monkeypatch):
    nvidia(tmp_path, monkeypatch, r"NVIDIA A, 80 GiB, 555.1\nNVIDIA A, 80 GiB, 555.1\n")
    found = doctor_machine.gpu()
    assert found.passed and found.found == "NVIDIA A, 80 GiB, 555.1; NVIDIA A, 80 GiB, 555.1"
    nvidia(tmp_path, monkeypatch, "Failed to initialize NVML", 18)
    failed = doctor_machine.gpu()
    assert failed.passed is False and failed.found == "Failed to initialize NVML" and "--gpus all" in failed.remedy
    nvidia(tmp_path, monkeypatch, "", 0)
    assert doctor_machine.gpu().passed is False


@pytest.mark.parametrize(("said", "passed"), [("0 cpu", False), ("2 H200", True)])
def test_a_library_that_does_not_see_the_gpus(tmp_path, monkeypatch, said, passed):
    nvidia(tmp_path, monkeypatch, "NVIDIA A")
    monkeypatch.setattr(doctor_probes, "JAX_DEVICES", f"print({said!r})")
    found = doctor_probes.devices("jax")
    assert found.passed is passed and ("jax[cuda12]" in found.remedy) is not passed


def test_nothing_is_tried_that_cannot_be_there(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert doctor_probes.devices("torch").passed is None and doctor_probes.nccl().passed is None
    monkeypatch.setattr(doctor_probes.importlib.util, "find_spec", lambda name: None)
    for found in (doctor_probes.ray(), suite("metaworld", "egl")):
        assert found.passed is None and "pip install" in found.remedy


def test_what_a_probe_does():
    assert attempt("print('one'); print('two')", timeout_s=30.0, remedy="r") == Finding(passed=True, found="two")
    failed = attempt("raise ValueError('broken')", timeout_s=30.0, remedy="mend it")
    assert (failed.passed, failed.found, failed.remedy) == (False, "ValueError: broken", "mend it")
    aborted = attempt("import os; os.abort()", timeout_s=30.0, remedy="mend it")
    assert aborted.passed is False and aborted.found == "exit code -6"


def test_a_probe_that_hangs_ends_with_all_that_it_started(tmp_path):
    code = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""
    found = attempt(code, str(tmp_path / "pid"), timeout_s=3.0, remedy="wait", late="too slow")
    assert (found.passed, found.found) == (False, "too slow")
    listed = subprocess.run(["ps", "-o", "stat=", "-p", (tmp_path / "pid").read_text()], capture_output=True, text=True)
    assert not listed.stdout.strip() or listed.stdout.startswith("Z")


def test_the_env_of_a_run_is_stepped(tmp_path):
    (tmp_path / "good.yaml").write_text("env: {type: point_reach, num_envs: 16}\nreward: {type: success}\n")
    (tmp_path / "bad.yaml").write_text("env: {type: custom, factory: 'nowhere:nothing'}\nreward: {type: success}\n")
    assert run_env(tmp_path / "good.yaml").found == "16 envs stepped, cameras top"
    bad = run_env(tmp_path / "bad.yaml")
    assert bad.passed is False and "nowhere" in bad.found and "docs/envs.md" in bad.remedy


def test_another_runs_manifest(enough, drawing, tmp_path, capsys):
    made = manifest(parse_config({"env": {"type": "point_reach"}, "reward": {"type": "success"}}, source="test"))
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(made))
    assert check(Options(renderer="ray", manifest=path))
    assert f"ok   as {path}: the same versions" in capsys.readouterr().out
    made["packages"]["numpy"] = "0.1"
    path.write_text(json.dumps(made))
    assert check(Options(renderer="ray", manifest=path))  # told, and no failure
    assert f"-    as {path}: numpy: 0.1 then, " in capsys.readouterr().out


@pytest.mark.skipif(
    "VLA_DOCTOR" not in os.environ, reason="starts Ray and envs of all suites: a minute; set VLA_DOCTOR=1"
)
def test_all_that_can_be_started(capsys):
    assert check(Options(renderer="egl", full=True))
    out = capsys.readouterr().out
    for name in ("ray", "suite tabletop", "suite metaworld", "suite pusht"):
        assert f"ok   {name}: " in out


def test_it_is_light():
    code = "import sys, vla_rlaif.doctor; print(sorted({'torch', 'jax', 'ray', 'mujoco'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
