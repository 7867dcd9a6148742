"""The two renderers, their threads, and what a machine without OpenGL is told."""

import os
import subprocess
import sys
import threading

import mujoco
import numpy as np
import pytest

from vla_rlaif.envs.tabletop import Tabletop
from vla_rlaif.envs.tabletop.ray_render import RayRenderer
from vla_rlaif.envs.tabletop.render import GLRenderer, check
from vla_rlaif.envs.tabletop.scene import CAMERAS, load_model


def run_python(code: str, **environment: str) -> str:
    """In a fresh process, since OpenGL can be loaded once only; returns all output."""
    env = {k: v for k, v in os.environ.items() if k not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def images() -> dict[str, dict[str, np.ndarray]]:
    images = {}
    for renderer in ("egl", "ray"):
        env = Tabletop("push", num_envs=3, image_size=64, renderer=renderer)
        images[renderer] = dict(env.reset(np.arange(3)).obs.images)
        env.close()
    return images


@pytest.mark.parametrize("camera", CAMERAS)
def test_ray_images_look_like_opengl_images(images: dict[str, dict[str, np.ndarray]], camera: str) -> None:
    egl, ray = images["egl"][camera].astype(int), images["ray"][camera].astype(int)
    assert np.abs(egl - ray).mean() < 8  # of 255; the checkered floor is plain in ray images
    assert (np.abs(egl - ray).max(axis=-1) > 60).mean() < 0.02  # edges only
    assert np.corrcoef(egl.ravel(), ray.ravel())[0, 1] > 0.95


def test_the_number_of_render_threads_does_not_change_a_pixel(images: dict[str, dict[str, np.ndarray]]) -> None:
    for renderer in ("egl", "ray"):
        env = Tabletop("push", num_envs=3, image_size=64, renderer=renderer, render_threads=1)
        for camera, image in env.reset(np.arange(3)).obs.images.items():
            np.testing.assert_array_equal(image, images[renderer][camera])
        env.close()


@pytest.mark.parametrize("renderer", ["egl", "ray"])
def test_only_the_given_members_are_drawn(renderer: str) -> None:
    model = load_model(16)
    draw = (
        RayRenderer(model, cameras=CAMERAS, image_size=16, num_threads=2)
        if renderer == "ray"
        else GLRenderer(model, cameras=CAMERAS, image_size=16, backend=renderer, num_threads=2)
    )
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 0)
    spec = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, spec))
    mujoco.mj_getState(model, data, state, spec)
    images = np.zeros((20, 2, 16, 16, 3), np.uint8)
    ids = np.array([1, *range(5, 17)])  # more than the ray renderer traces together
    draw(np.repeat(state[None], 20, axis=0), images, ids)
    assert np.flatnonzero(images.any(axis=(1, 2, 3, 4))).tolist() == ids.tolist()
    assert (images[ids] == images[1]).all()
    draw.close()
    draw.close()


def test_threads_end_with_close_and_with_the_last_reference() -> None:
    def num_canvas_threads() -> int:
        return sum(thread.name == "canvas" for thread in threading.enumerate())

    before = num_canvas_threads()
    closed = Tabletop("reach", num_envs=1, image_size=16)
    dropped = Tabletop("reach", num_envs=1, image_size=16)
    assert num_canvas_threads() == before + 4
    closed.close()
    del dropped
    assert num_canvas_threads() == before


def test_a_forgotten_close_is_silent_at_exit_whatever_mujoco_gl_says() -> None:
    code = (
        "import numpy as np; from vla_rlaif.envs.tabletop import Tabletop; "
        "env = Tabletop('reach', num_envs=2, image_size=16); env.reset(np.arange(2)); print('drawn')"
    )
    assert run_python(code, MUJOCO_GL="glfw") == "drawn\n"


def test_check_accepts_what_works() -> None:
    check("egl")
    check("ray")


def test_an_unknown_renderer_is_refused() -> None:
    for make in (check, lambda name: Tabletop("push", num_envs=1, renderer=name)):
        with pytest.raises(ValueError, match="Unknown renderer 'vulkan'; choose one of egl, osmesa, ray, warp"):
            make("vulkan")


def test_warp_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    for make in (lambda: check("warp"), lambda: Tabletop("push", num_envs=1, renderer="warp")):
        with pytest.raises(ValueError, match=r"needs the package mujoco_warp: pip install 'vla_rlaif\[warp\]'"):
            make()


def test_a_second_opengl_in_one_process_is_refused() -> None:
    check("egl")
    with pytest.raises(ValueError, match=r"has loaded OpenGL for 'egl'.*renderer: ray"):
        check("osmesa")


@pytest.mark.parametrize(("renderer", "packages"), [("egl", "libegl1 libgl1"), ("osmesa", "libosmesa6")])
def test_missing_opengl_says_what_to_install(renderer: str, packages: str) -> None:
    # ctypes is how PyOpenGL finds its libraries: hiding them there is a machine without them.
    code = f"""
import ctypes, ctypes.util
load = ctypes.CDLL.__init__
def load_other(self, name, *args, **kwargs):
    if name and any(part in str(name) for part in ("GL", "OSMesa")):
        raise OSError(f"{{name}}: cannot open shared object file")
    load(self, name, *args, **kwargs)
ctypes.CDLL.__init__ = load_other
ctypes.util.find_library = lambda name: None
from vla_rlaif.envs.tabletop.render import check
check("ray")
try:
    check({renderer!r})
except ValueError as error:
    print(error)
"""
    output = run_python(code)
    assert f"apt install {packages}" in output and "renderer: ray" in output
