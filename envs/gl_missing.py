"""What a machine without OpenGL is told. Standard library only (see single.py): importing mujoco may fail there."""

from __future__ import annotations

import traceback

_PACKAGES = {"egl": "libegl1 libgl1", "osmesa": "libosmesa6"}


def how_to_get_it(backend: str, error: BaseException) -> str:
    return (
        f"Renderer {backend!r} does not work on this machine ({type(error).__name__}: {error}). Install its libraries "
        f"(apt install {_PACKAGES[backend]}). The tabletop has renderer: ray as well, which needs none."
    )


def is_cause_of(error: BaseException) -> bool:
    """PyOpenGL says that a library is missing in many ways, all of them from its own modules."""
    return any("/OpenGL/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))
