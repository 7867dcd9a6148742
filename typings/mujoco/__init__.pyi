# mujoco fills its namespace from compiled modules without stubs, so pyright sees nothing in it.
from typing import Any

def __getattr__(name: str) -> Any: ...
