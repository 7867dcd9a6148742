"""Times as operators write them, in a day, a week or the calendar: always the wall clock of the pool's zone."""

import re
from datetime import date, datetime, timedelta

from vla_rlaif.schema import suggest

WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES


def parse_day_time(value: object) -> int:
    """'06:00' or '24:00' as minutes since midnight."""
    if isinstance(value, int):
        raise ValueError(
            f"YAML reads an unquoted {value // 60:02}:{value % 60:02} as the number {value}; quote it: "
            f'"{value // 60:02}:{value % 60:02}"'
        )
    found = re.fullmatch(r"(\d{1,2}):(\d{2})", str(value).strip())
    minutes = int(found[1]) * 60 + int(found[2]) if found and int(found[2]) < 60 else DAY_MINUTES + 1
    if minutes > DAY_MINUTES:
        raise ValueError(f'{value!r} is not a time of day; write "06:00", up to "24:00"')
    return minutes


def parse_weekday(value: str) -> int:
    if value not in WEEKDAYS:
        raise ValueError(f"{value!r} is not a day{suggest(value, WEEKDAYS)}")
    return WEEKDAYS.index(value)


def parse_days(value: object) -> tuple[int, ...]:
    """'mon-fri', 'sat,sun', 'fri-mon' as weekdays, Monday is 0."""
    days: set[int] = set()
    for part in str(value).lower().replace(" ", "").split(","):
        first, _, last = part.partition("-")
        start = parse_weekday(first)
        length = (parse_weekday(last or first) - start) % 7 + 1
        days |= {(start + i) % 7 for i in range(length)}
    return tuple(sorted(days))


def parse_week_time(value: object) -> int:
    """'fri 22:00' as minutes since Monday 00:00; 'sun 24:00' is the end of the week."""
    day, _, clock = str(value).strip().lower().partition(" ")
    if not clock:
        raise ValueError(f'{value!r} is not a time of the week; write "fri 22:00"')
    return parse_weekday(day) * DAY_MINUTES + parse_day_time(clock.strip())


def parse_wall_time(value: object) -> datetime:
    """'2026-11-02T13:00' as a naive datetime: the wall clock of the pool's zone."""
    is_day = isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value.strip())
    if is_day or (isinstance(value, date) and not isinstance(value, datetime)):
        raise ValueError(f'{value} has no time; write "{value}T00:00", or list whole days under dates')
    if not isinstance(value, datetime):
        text = str(value).strip().replace(" ", "T")
        midnight = text.endswith("T24:00")
        try:
            value = datetime.fromisoformat(text.replace("T24:00", "T00:00")) + timedelta(days=midnight)
        except ValueError:
            raise ValueError(f"{text!r} is not a date and time; write 2026-11-02T13:00") from None
    if value.tzinfo is not None:
        raise ValueError(f"{value.isoformat()} has an offset; times are the wall clock of timezone: leave it out")
    return value
