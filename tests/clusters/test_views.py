"""Views of memory that others write, when those who got one have written into it."""

import numpy as np
import pytest

from vla_rlaif.dist import views as module
from vla_rlaif.dist.shared_memory import Segment, SharedTicket
from vla_rlaif.dist.views import Views, is_written

SIZE = 40_000  # bytes: nine pages and a part of one


@pytest.fixture
def segment() -> Segment:
    segment = Segment(SIZE)
    segment.memory[:] = 1
    return segment


def ticket(segment: Segment, *others: Segment) -> SharedTicket:
    return segment.ticket([each.token for each in others])


def test_one_that_nobody_wrote_to_is_used_again(segment):
    views = Views()
    first = ticket(segment).view(SIZE, views)
    assert first.sum() == SIZE
    views.give({segment.token})
    views.take_back({segment.token})
    segment.memory[:] = 2
    assert ticket(segment).view(SIZE, views) is first and first.sum() == 2 * SIZE


@pytest.mark.parametrize("is_back", [True, False])
@pytest.mark.parametrize("at", [0, 20_000, SIZE - 1])
def test_one_that_was_written_to_is_made_anew(segment, at, is_back):
    views = Views()
    first = ticket(segment).view(SIZE, views)
    views.give({segment.token})
    first[at] = 9
    assert is_written(first) and segment.memory[at] == 1
    if is_back:
        views.take_back({segment.token})
    segment.memory[:] = 2
    second = ticket(segment).view(SIZE, views)
    assert second is not first and np.all(second == 2) and first[at] == 9
    assert ticket(segment).view(SIZE, views) is second  # nobody has got that one


def test_when_it_cannot_be_seen_it_is_made_anew(segment, monkeypatch):
    def hidden(view):
        raise PermissionError("no pagemap here")

    views = Views()
    first = ticket(segment).view(SIZE, views)
    views.give({segment.token})
    monkeypatch.setattr(module, "is_written", hidden)
    views.take_back({segment.token})
    assert ticket(segment).view(SIZE, views) is not first


def test_memory_that_is_gone_is_forgotten(segment):
    views, other = Views(), Segment(SIZE)
    first = ticket(segment).view(SIZE, views)
    ticket(other, segment).view(SIZE, views)
    assert ticket(segment, other).view(SIZE, views) is first
    ticket(other).view(SIZE, views)
    assert ticket(segment, other).view(SIZE, views) is not first
    views.take_back({segment.token, "unknown"})  # of which nothing is known any more
