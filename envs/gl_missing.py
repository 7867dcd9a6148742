"""What a machine without OpenGL is told. Standard library only (see single.py): importing mujoco may fail there."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_PACKAGES = {"egl": "libegl1 libgl1", "osmesa": "libosmesa6"}


def how_to_get_it(backend: str, error: BaseException) -> str:
    return (
        f"Renderer {backend!r} does not work on this machine ({type(error).__name__}: {error}). Install its libraries "
        f"(apt install {_PACKAGES.get(backend, 'libgl1')}). The tabletop has renderer: ray as well, which needs none "
        f"if MUJOCO_GL is not set."
    )


@contextmanager
def explained() -> Iterator[None]:
    """Around the import of mujoco, which loads what MUJOCO_GL names.

    Raises:
        ValueError: it is not there; what to install.
    """
    try:
        yield
    except Exception as error:
        # PyOpenGL says that a library is missing in many ways, all of them from its own modules.
        if not any("/OpenGL/" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
            raise
        raise ValueError(how_to_get_it(os.environ.get("MUJOCO_GL", "egl").lower(), error)) from error
