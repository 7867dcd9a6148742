"""Its place puts tests/ on the import path, so that tests share ``synthetic``."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Building a learned reward limits torch to one thread; tests after this one get their threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
