"""Time as integers: an instant is microseconds of UTC since 1970, a duration is microseconds.

Subtracting two aware datetimes of one zone ignores daylight saving (Python answers 8 h for the 7 h night of 28 March
2026 in Berlin), so nothing in the pool computes with datetimes: they are read and written here.
"""

import functools
import re
import zoneinfo
from datetime import UTC, datetime, timedelta

from vla_rlaif.schema import suggest

Micros = int
SECOND: Micros = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNITS = {"ms": SECOND // 1000, "s": SECOND, "m": MINUTE, "h": HOUR, "d": DAY}
DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def zone_of(name: str) -> zoneinfo.ZoneInfo:
    """The IANA zone of that name. Raises ValueError for an unknown one, or where there is no time zone data."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        known = zoneinfo.available_timezones()
        if not known:
            raise ValueError(f"timezone {name}: this machine has no time zone data; pip install tzdata.") from None
        hint = suggest(name, known) if len(name) > 3 else "; write an IANA name such as Europe/Berlin."
        raise ValueError(f"unknown timezone {name!r}{hint[:200]}") from None


def to_micros(moment: datetime) -> Micros:
    """The instant of an aware datetime."""
    assert moment.tzinfo is not None, "an instant needs a zone"
    return (moment.astimezone(UTC) - EPOCH) // timedelta(microseconds=1)


def to_local(instant: Micros, zone: zoneinfo.ZoneInfo) -> datetime:
    """The wall clock of a zone at an instant, as an aware datetime."""
    return (EPOCH + timedelta(microseconds=instant)).astimezone(zone)


def resolve(wall: datetime, zone: zoneinfo.ZoneInfo) -> Micros:
    """The instant at which a zone's wall clock shows ``wall`` (naive).

    A time that a change of the clocks skips means the first instant after the change; one that happens twice means
    the first time. The result never decreases with ``wall``, so windows that touch on the wall clock touch in UTC.
    """
    first = to_micros(wall.replace(tzinfo=zone, fold=0))
    if to_local(first, zone).replace(tzinfo=None) == wall:
        return first
    # In the gap, fold 0 reads the old offset and fold 1 the new one: the change lies in (early, late].
    early, late = to_micros(wall.replace(tzinfo=zone, fold=1)), first
    offset = to_local(late, zone).utcoffset()
    while late - early > 1:
        middle = (early + late) // 2
        early, late = (early, middle) if to_local(middle, zone).utcoffset() == offset else (middle, late)
    return late


def parse_duration(value: object) -> Micros:
    """'90s', '20m', '1h30m', '500ms', '2d'. Raises ValueError for anything else, a bare number included."""
    text = str(value).strip()
    parts = DURATION.findall(text)
    if isinstance(value, str) and parts and "".join(a + b for a, b in parts) == text:
        return sum(round(float(number) * UNITS[unit]) for number, unit in parts)
    raise ValueError(f"{value!r} is not a duration; write it with its unit, such as 90s, 20m or 1h30m")


def format_duration(duration: Micros) -> str:
    """For people: the two largest units, '1h30m'."""
    if duration < 0:
        return "-" + format_duration(-duration)
    if duration < MINUTE:
        return f"{duration / SECOND:.3g}s"
    units = (("d", DAY), ("h", HOUR), ("m", MINUTE), ("s", SECOND))
    at = next(i for i, (_, size) in enumerate(units) if duration >= size)
    (big, size), (small, part) = units[at], units[min(at + 1, 3)]
    whole, rest = divmod(round(duration / part), size // part)
    return f"{whole}{big}{rest}{small}" if rest and big != small else f"{whole}{big}"


@functools.lru_cache(maxsize=4096)
def say_time(instant: Micros, zone: zoneinfo.ZoneInfo, *, with_zone: bool = False) -> str:
    """'Mon 2026-11-02 13:00', with seconds only where they are not zero; the offset's name tells a repeated hour."""
    local = to_local(instant, zone)
    text = local.strftime("%a %Y-%m-%d %H:%M:%S").removesuffix(":00")
    return f"{text} {local.tzname()}" if with_zone else text
