"""What `doctor` tries out, each in a process of its own: a broken driver may abort instead of raising, and none of it
stays loaded."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from vla_rlaif.doctor_machine import Finding

NO_GL = "no answer within {:g} s; use env.renderer: ray, which needs no GL"

TORCH_DEVICES = "import torch; print(torch.cuda.device_count(), torch.version.cuda or 'built without CUDA')"
JAX_DEVICES = "import jax; print(sum(d.platform == 'gpu' for d in jax.devices()), jax.devices()[0].device_kind)"
# One process a GPU: each sends 1 to all, and gets their number.
NCCL = """
import os, sys, torch
import torch.multiprocessing as mp

def main(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=world)
    one = torch.ones(1024, device="cuda")
    torch.distributed.all_reduce(one)
    assert float(one[0]) == world, float(one[0])
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    import socket
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    world = torch.cuda.device_count()
    mp.spawn(main, (world, port), nprocs=world)
    print(world, "GPUs,", "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
"""
RAY = """
import ray
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
print("a task ran on", ray.get(ray.remote(lambda: ray.__version__).remote()))
ray.shutdown()
"""
RENDERING = """
import sys
from vla_rlaif.envs.gl_missing import explained
with explained():
    from vla_rlaif.envs.tabletop.render import check
check(sys.argv[1])
"""
STEP = """
import sys, numpy as np
from vla_rlaif.build import build_env
from vla_rlaif.config import load_config, parse_config
config = load_config(__import__("pathlib").Path(sys.argv[1])) if len(sys.argv) == 2 else parse_config(
    {"env": __import__("json").loads(sys.argv[2])}, source="doctor")
env = build_env(config.env)
now = env.reset(np.arange(env.num_envs))
now = env.step(np.zeros((env.num_envs, env.spec.chunk, env.spec.action_dim), np.float32))
assert now.valid.all(), "the simulation broke"
env.close()
print(f"{env.num_envs} envs stepped, cameras {', '.join(env.spec.cameras) or 'none'}")
"""
SUITES = {
    "tabletop": ("mujoco", '{"type": "tabletop", "num_envs": 8, "threads": 1, "renderer": "RENDERER"}'),
    "metaworld": ("metaworld", '{"type": "metaworld", "num_envs": 8, "workers": 1, "renderer": "GL"}'),
    "pusht": (
        "gym_pusht",
        '{"type": "gymnasium", "factory": "vla_rlaif.envs.pusht:make_env", "num_envs": 8, "workers": 1, '
        '"cameras": {"top": "render"}, "state": ["agent_pos"], "instructions": ["push"]}',
    ),
}


def attempt(
    code: str, *arguments: str, timeout_s: float, remedy: str, late: str = "", as_file: Path | None = None
) -> Finding:
    """Run ``code``; what it prints last is what was found. ``late``: what to say if it does not end."""
    command = [sys.executable, "-c", code, *arguments]
    if as_file is not None:  # processes that it spawns must be able to import it
        as_file.write_text(code)
        command = [sys.executable, str(as_file), *arguments]
    environment = {**os.environ, "RAY_prestart_worker_first_driver": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return Finding(passed=False, found=late or f"no answer within {timeout_s:g} s", remedy=remedy)
    said = [text for text in (out if process.returncode == 0 else err).strip().splitlines() if text.strip()]
    return Finding(
        passed=process.returncode == 0,
        found=said[-1] if said else ("works" if process.returncode == 0 else f"exit code {process.returncode}"),
        remedy="" if process.returncode == 0 else remedy,
    )


def _end(process: "subprocess.Popen[str]") -> None:
    """With all that it has started: they are in its session."""
    import signal

    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def rendering(renderer: str, timeout_s: float = 60.0) -> Finding:
    return attempt(RENDERING, renderer, timeout_s=timeout_s, remedy="", late=NO_GL.format(timeout_s))


def devices(backend: str) -> Finding:
    """Whether a library sees the GPUs that the driver has."""
    if shutil.which("nvidia-smi") is None:
        return Finding(passed=None, found="no GPU on this machine")
    if importlib.util.find_spec(backend) is None:
        return Finding(passed=None, found=f"{backend} is not installed")
    advice = {
        "jax": "pip install -U 'jax[cuda12]' (the plain wheel has no CUDA)",
        "torch": "install torch's CUDA build (https://pytorch.org/get-started/locally)",
    }[backend]
    found = attempt(JAX_DEVICES if backend == "jax" else TORCH_DEVICES, timeout_s=120.0, remedy=advice)
    if found.passed and found.found.startswith("0 "):
        return Finding(passed=False, found=f"sees no GPU ({found.found[2:]})", remedy=advice)
    return found


def nccl() -> Finding:
    """An all-reduce over all GPUs of this machine."""
    if shutil.which("nvidia-smi") is None or importlib.util.find_spec("torch") is None:
        return Finding(passed=None, found="needs GPUs and torch; cluster.sync and learners use gloo without")
    import tempfile

    advice = "run with NCCL_DEBUG=INFO; in a container give it --ipc=host or --shm-size=8g"
    with tempfile.TemporaryDirectory() as folder:
        return attempt(NCCL, timeout_s=180.0, remedy=advice, as_file=Path(folder) / "probe.py")


def ray() -> Finding:
    """A cluster of this machine alone, and a task on it."""
    if importlib.util.find_spec("ray") is None:
        return Finding(passed=None, found="not installed", remedy="pip install -c constraints.txt -e '.[ray]'")
    advice = "see shared memory and open files above; a half-dead cluster ends with `ray stop`"
    return attempt(RAY, timeout_s=180.0, remedy=advice)


def suite(name: str, renderer: str) -> Finding:
    """Eight envs of it, one step."""
    package, section = SUITES[name]
    if importlib.util.find_spec(package) is None:
        advice = "pip install -c constraints.txt -e '.[suites]'"
        return Finding(passed=None, found=f"{package} is not installed", remedy=advice)
    gl = renderer if renderer in ("egl", "osmesa") else "egl"
    section = section.replace("RENDERER", renderer).replace("GL", gl)
    return attempt(STEP, "env", section, timeout_s=180.0, remedy="docs/envs.md has what a suite needs")


def run_env(config: Path) -> Finding:
    """The env of a run, one step."""
    advice = "docs/envs.md has what a suite needs; `vla-rlaif plan` shows what the config asks for"
    return attempt(STEP, str(config), timeout_s=600.0, remedy=advice)
