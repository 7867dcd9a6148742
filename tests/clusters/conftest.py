"""One Ray cluster for all tests of this folder that a pytest process runs; it ends before any other test begins."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from ray_session import is_running, stop


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Threads that nobody takes for dead and that may die often. Files with other needs have a fixture of their own."""
    from vla_rlaif.dist.thread_cluster import ThreadCluster  # not before pytest checks the package's types

    cluster = ThreadCluster(suspect_s=100.0, dead_s=200.0, max_restarts=1000)
    yield cluster
    cluster.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the fixtures of the last test here: those of other folders may want a Ray of their own."""
    folder = os.path.dirname(__file__)
    if is_running() and (nextitem is None or not str(nextitem.path).startswith(folder)):
        stop()
