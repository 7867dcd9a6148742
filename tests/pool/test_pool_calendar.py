import re
from itertools import pairwise

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_worlds import at, factory, small

from vla_rlaif.pool.calendar import Override, around, compile_timeline, shares_of
from vla_rlaif.pool.checks import cautions, check_calendar
from vla_rlaif.pool.clock import DAY, HOUR, MINUTE, say_time
from vla_rlaif.pool.config import parse_pool
from vla_rlaif.pool.times import WEEKDAYS

NOW = at("2026-11-04T12:00")  # a Wednesday
DAILY = {"name": "day", "days": "mon-fri", "start": "06:00", "end": "22:00"}
TRAP = [
    DAILY,
    {"name": "night", "days": "mon-fri", "start": "22:00", "end": "06:00"},
    {"name": "weekend", "days": "sat-sun", "start": "00:00", "end": "24:00"},
]


def rows(config, start, end, overrides=()):
    """(window, start, end) on the wall clock."""
    timeline = compile_timeline(config, start, end, overrides=overrides)
    zone = timeline.zone
    return [(i.window, say_time(i.start, zone)[4:], say_time(i.end, zone)[4:]) for i in timeline.intervals]


def windows(*items, **changes):
    """A factory pool whose windows are these, with shares for each."""
    names = {w["name"] for w in items} | {e["use"] for e in changes.get("exceptions", ())}
    shares = {name: {"serve": {"min": 1, "target": 2}} for name in names}
    return factory(windows=list(items), shares=shares, **({"exceptions": []} | changes))


def test_the_example_week():
    assert rows(factory(), at("2026-11-04T12:00"), at("2026-11-10T12:00")) == [
        ("day", "2026-11-04 12:00", "2026-11-04 22:00"),
        ("night", "2026-11-04 22:00", "2026-11-05 06:00"),
        ("day", "2026-11-05 06:00", "2026-11-05 22:00"),
        ("night", "2026-11-05 22:00", "2026-11-06 06:00"),
        ("day", "2026-11-06 06:00", "2026-11-06 22:00"),
        ("weekend", "2026-11-06 22:00", "2026-11-09 06:00"),
        ("day", "2026-11-09 06:00", "2026-11-09 22:00"),
        ("night", "2026-11-09 22:00", "2026-11-10 06:00"),
        ("day", "2026-11-10 06:00", "2026-11-10 12:00"),
    ]


@pytest.mark.parametrize(
    ("zone", "evening", "hours"),
    [
        ("Europe/Berlin", "2026-03-28", 7),
        ("Europe/Berlin", "2026-10-24", 9),
        ("America/New_York", "2026-03-07", 7),
        ("America/New_York", "2026-10-31", 9),
        ("Australia/Lord_Howe", "2026-04-04", 8.5),
    ],
)
def test_nights_in_which_the_clocks_change(zone, evening, hours):
    config = windows(
        {"name": "day", "days": "mon-sun", "start": "06:00", "end": "22:00"},
        {"name": "night", "days": "mon-sun", "start": "22:00", "end": "06:00"},
        timezone=zone,
    )
    noon = at(f"{evening}T12:00", zone)
    night = compile_timeline(config, noon, noon + DAY).at(at(f"{evening}T23:00", zone))
    assert night.window == "night" and night.duration == hours * HOUR
    note = f"the clocks change in night from .*{evening} 22:00: it lasts {hours:g} h"
    assert any(re.search(note, text) for text in cautions(config, now=noon))


def test_fridays_night_belongs_to_friday():
    # mon-fri must not open on Saturday at 22:00, and Friday's night ends on Saturday at 06:00.
    config = windows(
        DAILY,
        {"name": "night", "days": "mon-fri", "start": "22:00", "end": "06:00"},
        {"name": "weekend", "from": "sat 06:00", "to": "mon 06:00"},
    )
    check_calendar(config, now=NOW)
    timeline = around(config, NOW)
    assert timeline.at(at("2026-11-07T05:59")).window == "night"
    assert timeline.at(at("2026-11-07T22:30")).window == "weekend"
    assert timeline.at(at("2026-11-09T05:59")).window == "weekend"
    # A boundary belongs to the window that begins: intervals are half-open.
    assert timeline.at(at("2026-11-09T06:00")).window == "day"


def test_the_calendar_people_write_first():
    config = windows(*TRAP)
    with pytest.raises(ValueError) as caught:
        check_calendar(config, now=NOW)
    message = str(caught.value)
    assert "night and weekend both rule Sat 2026-11-07 00:00 to Sat 2026-11-07 06:00 (every week)" in message
    assert "no window rules Mon 2026-11-09 00:00 to Mon 2026-11-09 06:00 (every week)" in message
    suggestion = re.search(r"\{name: weekend.*?\}", message)
    assert suggestion is not None
    assert suggestion.group() == '{name: weekend, from: "sat 06:00", to: "mon 06:00"}'
    check_calendar(windows(*TRAP[:2], yaml.safe_load(suggestion.group())), now=NOW)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            [DAILY],
            r"no window rules .* Add a window for it, e\.g\. \{name: day, from: \"mon 22:00\", to: \"tue 06:00\"\}",
        ),
        (
            [{"name": "a", "from": "mon 00:00", "to": "sun 24:00"}, DAILY],
            r"a and day both rule Thu 2026-11-05 06:00 to Thu 2026-11-05 22:00 .*give a or day a higher priority",
        ),
        (
            [{"name": "a", "from": "mon 00:00", "to": "sun 23:00"}],
            r'one span: \{name: a, from: "mon 00:00", to: "sun 24:00"',
        ),
        (
            [
                {"name": "a", "from": "wed 00:00", "to": "sun 22:00"},
                {"name": "b", "from": "mon 02:00", "to": "wed 00:00"},
            ],
            r"no window rules Sun 2026-11-08 22:00 to Mon 2026-11-09 02:00",
        ),
    ],
)
def test_gaps_and_overlaps_are_told_with_dates(items, message):
    with pytest.raises(ValueError, match=message):
        check_calendar(windows(*items), now=NOW)


def test_a_whole_week_and_a_priority():
    week = {"name": "a", "from": "mon 00:00", "to": "sun 24:00"}
    config = windows(week, DAILY | {"priority": 1})
    check_calendar(config, now=NOW)
    assert [r[0] for r in rows(config, at("2026-11-06T00:00"), at("2026-11-09T07:00"))] == ["a", "day", "a", "day"]


def test_until_24_00_is_the_same_as_until_midnight():
    late = {"name": "late", "days": "mon-sun", "start": "22:00", "end": "24:00"}
    early = {"name": "early", "days": "mon-sun", "start": "00:00", "end": "22:00"}
    check_calendar(windows(late, early), now=NOW)
    assert rows(windows(late, early), NOW, NOW + DAY) == rows(windows(late | {"end": "00:00"}, early), NOW, NOW + DAY)


def test_exceptions_rule_whole_days_and_stretches():
    config = factory()
    # Thursday, 24 December 2026: the whole local day; the night of the 23rd is cut at midnight.
    assert rows(config, at("2026-12-23T23:00"), at("2026-12-25T07:00")) == [
        ("night", "2026-12-23 23:00", "2026-12-24 00:00"),
        ("weekend", "2026-12-24 00:00", "2026-12-25 00:00"),
        ("night", "2026-12-25 00:00", "2026-12-25 06:00"),
        ("day", "2026-12-25 06:00", "2026-12-25 07:00"),
    ]
    assert rows(config, at("2026-11-02T12:00"), at("2026-11-02T16:00")) == [
        ("day", "2026-11-02 12:00", "2026-11-02 13:00"),
        ("line_stop", "2026-11-02 13:00", "2026-11-02 15:00"),
        ("day", "2026-11-02 15:00", "2026-11-02 16:00"),
    ]


def test_two_dates_are_two_days_and_not_a_stretch():
    texts = " ".join(cautions(factory(), now=NOW))
    assert "2026-12-24 and 2027-01-01; the days between keep" in texts
    assert "from: 2026-12-24T00:00, to: 2027-01-01T24:00" in texts
    stretch = factory(exceptions=[{"from": "2026-12-24T00:00", "to": "2027-01-01T24:00", "use": "weekend"}])
    # Across the end of the year, and until Saturday's own weekend: one rule after the other, nothing in between.
    assert rows(stretch, at("2026-12-30T12:00"), at("2027-01-02T12:00")) == [
        ("weekend", "2026-12-30 12:00", "2027-01-02 00:00"),
        ("weekend", "2027-01-02 00:00", "2027-01-02 12:00"),
    ]


def test_year_end_and_leap_day():
    night = rows(factory(exceptions=[]), at("2026-12-31T21:00"), at("2027-01-01T07:00"))
    assert night[1] == ("night", "2026-12-31 22:00", "2027-01-01 06:00")
    assert rows(factory(exceptions=[]), at("2028-02-28T23:00"), at("2028-03-01T06:00")) == [
        ("night", "2028-02-28 23:00", "2028-02-29 06:00"),
        ("day", "2028-02-29 06:00", "2028-02-29 22:00"),
        ("night", "2028-02-29 22:00", "2028-03-01 06:00"),
    ]
    leap = factory(exceptions=[{"dates": ["2028-02-29"], "use": "weekend"}])
    assert rows(leap, at("2028-02-29T00:00"), at("2028-03-01T00:00"))[0][0] == "weekend"
    with pytest.raises(ValueError, match=r"dates\.0"):
        factory(exceptions=[{"dates": ["2027-02-29"], "use": "weekend"}])


def test_an_exception_across_midnight():
    config = factory(exceptions=[{"from": "2026-11-04T20:00", "to": "2026-11-05T08:00", "use": "line_stop"}])
    assert rows(config, at("2026-11-04T19:00"), at("2026-11-05T09:00")) == [
        ("day", "2026-11-04 19:00", "2026-11-04 20:00"),
        ("line_stop", "2026-11-04 20:00", "2026-11-05 08:00"),
        ("day", "2026-11-05 08:00", "2026-11-05 09:00"),
    ]


def test_two_exceptions_that_overlap():
    first = {"from": "2026-11-04T10:00", "to": "2026-11-04T14:00", "use": "weekend"}
    second = {"from": "2026-11-04T13:00", "to": "2026-11-04T16:00", "use": "line_stop"}
    message = (
        r"weekend \(exception of 2026-11-04\) and line_stop \(exception of 2026-11-04\) both rule "
        r"Wed 2026-11-04 13:00 to Wed 2026-11-04 14:00 with priority 10"
    )
    with pytest.raises(ValueError, match=message):
        check_calendar(factory(exceptions=[first, second]), now=NOW)
    ranked = factory(exceptions=[first, second | {"priority": 20}])
    check_calendar(ranked, now=NOW)
    assert [r[0] for r in rows(ranked, at("2026-11-04T09:00"), at("2026-11-04T17:00"))] == [
        "day",
        "weekend",
        "line_stop",
        "day",
    ]


def test_an_exception_as_important_as_a_window():
    with pytest.raises(ValueError, match=r"both rule Thu 2026-12-24 .* with priority 0"):
        check_calendar(factory(exceptions=[{"dates": ["2026-12-24"], "use": "weekend", "priority": 0}]), now=NOW)


def test_an_exception_that_the_clocks_skip():
    gap = [{"from": "2026-03-29T02:10", "to": "2026-03-29T02:50", "use": "line_stop"}]
    with pytest.raises(ValueError, match="lies in hours that the clocks skip"):
        check_calendar(factory(exceptions=gap), now=NOW)


def test_an_exception_that_a_window_outranks_is_told():
    config = factory(
        windows=[{"name": "weekend", "from": "mon 00:00", "to": "sun 24:00", "priority": 50}],
        exceptions=[{"dates": ["2026-12-24"], "use": "line_stop"}],
    )
    assert any("exception line_stop of 2026-12-24 never rules" in text for text in cautions(config, now=NOW))


def test_overrides_rule_everything_and_end():
    override = Override(id=1, start=at("2026-11-02T12:00"), end=at("2026-11-02T14:00"), use="night", note="fire drill")
    assert rows(factory(), at("2026-11-02T11:00"), at("2026-11-02T16:00"), [override]) == [
        ("day", "2026-11-02 11:00", "2026-11-02 12:00"),
        ("night", "2026-11-02 12:00", "2026-11-02 14:00"),
        ("line_stop", "2026-11-02 14:00", "2026-11-02 15:00"),
        ("day", "2026-11-02 15:00", "2026-11-02 16:00"),
    ]
    later = Override(id=2, start=at("2026-11-02T13:00"), end=at("2026-11-02T15:00"), use="weekend")
    assert [r[0] for r in rows(factory(), at("2026-11-02T12:30"), at("2026-11-02T15:30"), [override, later])] == [
        *("night", "weekend", "day")
    ]


def test_an_override_of_gpus_keeps_the_window_and_its_minimum():
    config = factory()
    override = Override(id=7, start=NOW, end=NOW + HOUR, targets={"serve": 40, "train": 3}, note="demo")
    timeline = around(config, NOW, overrides=[override])
    now, after = timeline.at(NOW), timeline.at(NOW + HOUR)
    assert (now.window, now.source, after.source) == ("day", "override 7: demo", "calendar")
    shares = shares_of(config, now)
    assert (shares["serve"].min, shares["serve"].target, shares["serve"].most) == (16, 40, 40)
    assert shares["train"].target == 3 and shares["rollout"] == config.shares["day"]["rollout"]
    low = Override(id=8, start=NOW, end=NOW + HOUR, targets={"serve": 1})
    assert shares_of(config, around(config, NOW, overrides=[low]).at(NOW))["serve"].target == 16


def test_cautions_about_sizes():
    def change(data):
        data["shares"]["day"] = {"serve": {"min": 6, "target": 6, "max": 6}, "train": {"min": 8, "target": 8}}
        data["shares"]["night"] = {"serve": {"min": 1, "target": 1}, "train": {"target": 2}}

    texts = cautions(small(change), now=NOW)
    assert any("day: the minimums ask for 14 of 12 GPUs" in t for t in texts)
    assert any("night: the shares use 3 of 12 GPUs; 9 stay idle" in t for t in texts)
    # 6 GPUs on 3 nodes: a node takes 2 away. 9 on 3 nodes: 3 away, 6 are left.
    assert any("serve at max 6 falls below min 6 when a node dies; 9 GPUs would survive that" in t for t in texts)


@settings(max_examples=40, deadline=None)
@given(
    zone=st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC"]),
    cuts=st.sets(st.integers(0, 7 * 24 * 4 - 1), min_size=1, max_size=6),
    week=st.integers(0, 60),
)
def test_every_instant_has_exactly_one_window(zone, cuts, week):
    """Spans that share their ends on the wall clock leave no gap and no overlap in UTC, whatever the clocks do."""
    edges = sorted(15 * c for c in cuts)

    def text(minute):
        return f"{WEEKDAYS[minute // 1440]} {minute % 1440 // 60:02}:{minute % 60:02}"

    ends = [*edges[1:], edges[0]]
    items = [
        {"name": f"w{i}", "from": text(a), "to": text(b)} for i, (a, b) in enumerate(zip(edges, ends, strict=True))
    ]
    if len(edges) == 1:
        items = [{"name": "w0", "from": "mon 00:00", "to": "sun 24:00"}]
    data = {
        **{"pool": {"nodes": 1, "gpus_per_node": 1}, "timezone": zone, "windows": items},
        **{"shares": {i["name"]: {"r": {"target": 1}} for i in items}},
        "roles": {"r": {"priority": 1, "preemptible": "at_chunk"}},
    }
    config = parse_pool(data, source="test")
    start = at("2026-01-01T00:00", zone) + week * 7 * DAY + 17 * MINUTE
    check_calendar(config, now=start)
    intervals = compile_timeline(config, start, start + 9 * DAY).intervals
    assert intervals[0].start == start and intervals[-1].end == start + 9 * DAY
    assert all(a.end == b.start and a.duration > 0 for a, b in pairwise(intervals))
    assert all(a.window != b.window for a, b in pairwise(intervals))
