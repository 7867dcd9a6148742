"""Its place puts tests/ on the import path, so that tests share ``synthetic``."""

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def ordinary_priority() -> Iterator[None]:
    """A video encoder once made a test process real-time, and the browsers that it started later starved each other."""
    yield
    if sys.platform == "linux":
        assert os.sched_getscheduler(0) == os.SCHED_OTHER, "the test has left this thread with another scheduler"
