"""Objects from the user's own code, named in a config as ``package.module:name``."""

import importlib
from collections.abc import Callable
from typing import Any


def load_symbol(path: str) -> Callable[..., Any]:
    """The function or class that ``path`` names.

    Raises:
        ValueError: it is not there. An error inside the user's module is not caught.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{path!r} does not name anything; wanted 'package.module:name'.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's module was found, but something that it imports was not
        raise ValueError(
            f"{path!r} names the module {error.name!r}, which cannot be found: install its package or add its folder "
            "to PYTHONPATH."
        ) from error
    if name not in vars(module):
        raise ValueError(f"the module {module_name!r} has no {name!r} (from {path!r}).")
    found = vars(module)[name]
    if not callable(found):
        raise ValueError(f"{path} is a {type(found).__name__}, wanted something to call.")
    return found
