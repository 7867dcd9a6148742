"""Facts about zones were computed with zoneinfo and are written down here as numbers."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rlaif.pool.clock import (
    HOUR,
    MINUTE,
    SECOND,
    format_duration,
    parse_duration,
    resolve,
    say_time,
    to_local,
    to_micros,
    zone_of,
)


@pytest.mark.parametrize(
    ("zone", "evening", "hours"),
    [
        ("Europe/Berlin", "2026-11-02", 8),
        ("Europe/Berlin", "2026-03-28", 7),
        ("Europe/Berlin", "2026-10-24", 9),
        ("America/New_York", "2026-03-07", 7),
        ("America/New_York", "2026-10-31", 9),
        ("Australia/Lord_Howe", "2026-04-04", 8.5),
        ("UTC", "2026-03-28", 8),
        ("Asia/Kathmandu", "2026-03-28", 8),
    ],
)
def test_how_long_22_to_06_lasts(zone, evening, hours):
    start = datetime.fromisoformat(f"{evening}T22:00")
    end = start + timedelta(hours=8)
    assert resolve(end, zone_of(zone)) - resolve(start, zone_of(zone)) == hours * HOUR


def test_python_itself_says_8_hours_for_the_7_hour_night():
    # Why nothing computes with datetimes: aware datetimes of one zone are subtracted on the wall clock.
    zone = ZoneInfo("Europe/Berlin")
    start, end = datetime(2026, 3, 28, 22, tzinfo=zone), datetime(2026, 3, 29, 6, tzinfo=zone)
    assert end - start == timedelta(hours=8)
    assert to_micros(end) - to_micros(start) == 7 * HOUR


def test_a_time_in_a_gap_is_the_first_instant_after_it():
    # Berlin, 29 March 2026: 02:00 CET becomes 03:00 CEST at 01:00 UTC.
    berlin = zone_of("Europe/Berlin")
    change = to_micros(datetime(2026, 3, 29, 1, tzinfo=UTC))
    for wall in ("02:00", "02:17:30", "02:59:59.999999", "03:00"):
        assert resolve(datetime.fromisoformat(f"2026-03-29T{wall}"), berlin) == change
    # Lord Howe, 4 October 2026: half an hour is skipped, 02:00 becomes 02:30 at 15:30 UTC the day before.
    lord_howe = zone_of("Australia/Lord_Howe")
    assert resolve(datetime(2026, 10, 4, 2, 10), lord_howe) == to_micros(datetime(2026, 10, 3, 15, 30, tzinfo=UTC))
    # Samoa skipped the whole of 30 December 2011 at midnight, 10:00 UTC.
    assert resolve(datetime(2011, 12, 30, 12), zone_of("Pacific/Apia")) == to_micros(
        datetime(2011, 12, 30, 10, tzinfo=UTC)
    )


def test_a_time_in_a_fold_is_the_first_occurrence():
    # Berlin, 25 October 2026: 02:30 happens at 00:30 UTC and again at 01:30 UTC.
    assert resolve(datetime(2026, 10, 25, 2, 30), zone_of("Europe/Berlin")) == to_micros(
        datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    )


@settings(max_examples=60, deadline=None)
@given(
    zone=st.sampled_from(
        ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "Asia/Gaza"]
    ),
    start=st.datetimes(datetime(2026, 1, 1), datetime(2030, 1, 1)),
    step=st.integers(0, 3 * 86400),
)
def test_instants_never_decrease_with_the_wall_clock(zone, start, step):
    later = start + timedelta(seconds=step)
    assert resolve(start, zone_of(zone)) <= resolve(later, zone_of(zone))


@settings(max_examples=60, deadline=None)
@given(
    zone=st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"]),
    instant=st.integers(0, 4_000_000_000).map(lambda s: s * SECOND),
)
def test_resolve_is_the_first_instant_that_shows_its_time(zone, instant):
    wall = to_local(instant, zone_of(zone)).replace(tzinfo=None)
    first = resolve(wall, zone_of(zone))
    assert first <= instant and to_local(first, zone_of(zone)).replace(tzinfo=None) == wall


@pytest.mark.parametrize(
    ("text", "micros"),
    [("90s", 90 * SECOND), ("20m", 20 * MINUTE), ("1h30m", 90 * MINUTE), ("500ms", SECOND // 2), ("2d", 48 * HOUR)],
)
def test_durations(text, micros):
    assert parse_duration(text) == micros


@pytest.mark.parametrize("value", ["", "90", 90, "1.5", "h", "10 m", "-5s", True, "5m extra"])
def test_a_duration_without_its_unit_is_a_mistake(value):
    with pytest.raises(ValueError, match="write it with its unit"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("micros", "text"),
    [(0, "0s"), (1_500_000, "1.5s"), (90 * SECOND, "1m30s"), (2 * HOUR, "2h"), (49 * HOUR, "2d1h"), (-SECOND, "-1s")],
)
def test_durations_for_people(micros, text):
    assert format_duration(micros) == text


def test_a_repeated_hour_is_told_apart_by_the_offset():
    berlin = zone_of("Europe/Berlin")
    instants = [to_micros(datetime(2026, 10, 25, hour, 30, tzinfo=UTC)) for hour in (0, 1)]
    assert [say_time(t, berlin, with_zone=True) for t in instants] == [
        "Sun 2026-10-25 02:30 CEST",
        "Sun 2026-10-25 02:30 CET",
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("Europe/Berln", "did you mean Europe/Berlin"), ("", "unknown timezone"), ("../etc/passwd", "unknown timezone")],
)
def test_an_unknown_zone_is_told_at_once(name, hint):
    with pytest.raises(ValueError, match=hint):
        zone_of(name)
