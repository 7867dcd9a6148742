"""pytest does not look into folders of some names, "dist" and "build" among them, unless it is told to."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_pytest_looks_into_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    names = {part for path in TESTS.rglob("test_*.py") for part in path.relative_to(TESTS).parts[:-1]}
    assert {"clusters", "envs", "policies"} <= names
    hidden = [
        name for name in sorted(names) for pattern in pytestconfig.getini("norecursedirs") if fnmatch(name, pattern)
    ]
    assert hidden == []
