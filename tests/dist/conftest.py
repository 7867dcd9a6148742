"""One Ray cluster for all tests of this folder that a pytest process runs; it ends before any other test begins."""

import os

import pytest
from ray_session import is_running, stop


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the fixtures of the last test here: those of other folders may want a Ray of their own."""
    folder = os.path.dirname(__file__)
    if is_running() and (nextitem is None or not str(nextitem.path).startswith(folder)):
        stop()
