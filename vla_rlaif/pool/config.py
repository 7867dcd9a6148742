"""The pool as frozen, strictly validated models; a pool is a YAML file that fills them (configs/pool_factory.yaml).

Whatever can be said without a date is checked here. What needs one (gaps, overlaps, exceptions) is in `checks.py`.
"""

import functools
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from vla_rlaif.pool.clock import MINUTE, SECOND, Micros, parse_duration, zone_of
from vla_rlaif.pool.times import DAY_MINUTES, parse_day_time, parse_days, parse_wall_time, parse_week_time
from vla_rlaif.schema import Model, parse, read_mapping, suggest

EXCEPTION_PRIORITY = 10

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Duration = Annotated[Micros, BeforeValidator(parse_duration)]


class PoolSize(Model):
    nodes: Positive
    gpus_per_node: Positive

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node


class Window(Model):
    """Daily hours (days, start, end), or one span of the week (from, to). A night belongs to the day it starts on."""

    name: str
    days: Annotated[tuple[int, ...], BeforeValidator(parse_days)] | None = None
    start: Annotated[int, BeforeValidator(parse_day_time)] | None = None  # minutes since midnight
    end: Annotated[int, BeforeValidator(parse_day_time)] | None = None
    from_: Annotated[int, BeforeValidator(parse_week_time)] | None = Field(default=None, alias="from")
    to: Annotated[int, BeforeValidator(parse_week_time)] | None = None
    priority: int = 0  # of windows that overlap, the highest rules

    @model_validator(mode="after")
    def _one_kind(self) -> "Window":
        daily, span = (self.days, self.start, self.end), (self.from_, self.to)
        if not (None not in daily and span == (None, None)) and not (None not in span and daily == (None, None, None)):
            raise ValueError(f"window {self.name} needs days, start and end (daily hours), or from and to (a span).")
        if self.start is not None and self.start == DAY_MINUTES:
            raise ValueError(f'window {self.name} starts at 24:00; write start: "00:00" on the next day.')
        if self.start is not None and self.start == self.end:
            raise ValueError(
                f'window {self.name} starts and ends at the same time; a whole day is start: "00:00", end: "24:00".'
            )
        if self.from_ is not None and self.from_ == self.to:
            raise ValueError(
                f'window {self.name} starts and ends at the same time; a whole week is from: "mon 00:00", '
                'to: "sun 24:00".'
            )
        return self


class CalendarException(Model):
    """Whole days (dates) or one stretch of time (from, to) in which the shares of ``use`` hold."""

    use: str
    dates: tuple[date, ...] | None = None  # each a whole local day; a longer stretch is from, to
    from_: Annotated[datetime, BeforeValidator(parse_wall_time)] | None = Field(default=None, alias="from")
    to: Annotated[datetime, BeforeValidator(parse_wall_time)] | None = None
    priority: int = EXCEPTION_PRIORITY

    @model_validator(mode="after")
    def _one_kind(self) -> "CalendarException":
        if (self.dates is not None) == (self.from_ is not None and self.to is not None) or (
            self.dates is not None and (self.from_ is not None or self.to is not None)
        ):
            raise ValueError(f"exception {self.use} needs dates (whole days), or from and to.")
        if self.from_ is not None and self.to is not None and self.to <= self.from_:
            raise ValueError(f"exception {self.use} ends at {self.to}, which is not after its start {self.from_}.")
        if self.dates is not None and (not self.dates or len(set(self.dates)) < len(self.dates)):
            raise ValueError(f"exception {self.use}: dates must name at least one day, and each only once.")
        return self

    @property
    def spans(self) -> tuple[tuple[datetime, datetime], ...]:
        """Wall-clock stretches [from, to)."""
        if self.from_ is not None and self.to is not None:
            return ((self.from_, self.to),)
        midnights = [datetime.combine(day, time()) for day in self.dates or ()]
        return tuple((start, start + timedelta(days=1)) for start in midnights)


class Share(Model):
    """GPUs of one role in one window."""

    min: Count = 0  # never fewer, as long as there are GPUs
    target: Count
    max: Count | None = None  # how far GPUs that nobody else wants may go to this role; default: the target

    @model_validator(mode="after")
    def _ordered(self) -> "Share":
        if not self.min <= self.target <= self.most:
            raise ValueError(f"min {self.min}, target {self.target}, max {self.most} must not decrease.")
        return self

    @property
    def most(self) -> int:
        return self.target if self.max is None else self.max


NO_SHARE = Share(target=0)


class Slo(Model):
    p99_ms: Annotated[float, Field(gt=0)]  # above it the role grows towards its max


class Role(Model):
    """What GPUs may do. The durations are declared for a cold start: measured ones replace them."""

    priority: int
    preemptible: Literal[False, "checkpoint", "at_chunk"]  # False: never shrinks before its window ends
    gpus_per_replica: Positive = 1  # replicas are handed over whole
    sizes: tuple[Positive, ...] | None = None  # GPUs the role may run on; default: any number of replicas
    global_batch: Positive | None = None  # kept by gradient accumulation, so replicas must divide it
    survives_node_loss: bool | None = None  # min holds when any one node dies; default: if not preemptible
    acquire: Duration = 5 * SECOND
    warmup: Duration = 60 * SECOND
    sync: Duration = 10 * SECOND
    drain: Duration = 30 * SECOND
    checkpoint: Duration = 60 * SECOND  # with preemptible: checkpoint
    release: Duration = 5 * SECOND
    min_runtime: Duration = 0  # shorter is not worth a start
    slo: Slo | None = None

    @model_validator(mode="after")
    def _sizes_fit(self) -> "Role":
        for size in self.sizes or ():
            if size % self.gpus_per_replica:
                raise ValueError(f"size {size} is not a multiple of gpus_per_replica {self.gpus_per_replica}.")
            if self.global_batch is not None and self.global_batch % (size // self.gpus_per_replica):
                raise ValueError(
                    f"global_batch {self.global_batch} does not split over the {size // self.gpus_per_replica} "
                    f"replicas of size {size}."
                )
        return self

    @property
    def checkpoints(self) -> bool:
        """It restores its own state when it starts; other roles take the committed weights."""
        return self.preemptible == "checkpoint"

    @property
    def is_protected(self) -> bool:
        return self.preemptible is False if self.survives_node_loss is None else self.survives_node_loss

    def allows(self, num_gpus: int) -> bool:
        if not num_gpus:
            return True
        replicas, rest = divmod(num_gpus, self.gpus_per_replica)
        if rest or (self.sizes is not None and num_gpus not in self.sizes):
            return False
        return self.global_batch is None or self.global_batch % replicas == 0

    def at_most(self, num_gpus: int) -> int:
        """The largest size it may run on, of at most so many GPUs."""
        if self.allows(num_gpus):
            return num_gpus
        return next(n for n in range(num_gpus, -1, -1) if self.allows(n))

    def accumulation(self, num_gpus: int) -> int:
        """Micro-batches per update and replica, relative to one replica's share of the global batch."""
        assert self.global_batch is not None and num_gpus, "only a running role with a global batch accumulates"
        return self.global_batch // (num_gpus // self.gpus_per_replica)


class Transition(Model):
    safety: Annotated[float, Field(ge=1)] = 1.5  # the lead is this times what the steps take
    min_dwell: Duration = 10 * MINUTE  # a replica keeps its GPUs at least so long
    on_overrun: Literal["kill", "wait"] = "kill"


class Learning(Model):
    """How fast episodes are made and used: which of them the trainer would have to discard."""

    rollout: str = "rollout"  # role that makes episodes
    trainer: str = "train"  # role that uses them
    staleness: Count  # an episode is used while the weights are at most so many updates newer
    episodes_per_gpu_hour: Annotated[float, Field(gt=0)]
    episodes_per_update: Positive
    updates_per_gpu_hour: Annotated[float, Field(gt=0)]


class PoolConfig(Model):
    pool: PoolSize
    timezone: str
    windows: Annotated[tuple[Window, ...], Field(min_length=1)]
    exceptions: tuple[CalendarException, ...] = ()
    shares: dict[str, dict[str, Share]]
    roles: dict[str, Role]
    transition: Transition = Transition()
    learning: Learning | None = None
    state_dir: Path = Path("runs/pool")  # overrides, measured durations, lease

    @field_validator("timezone")
    @classmethod
    def _zone_exists(cls, name: str) -> str:
        zone_of(name)
        return name

    @model_validator(mode="after")
    def _names_fit(self) -> "PoolConfig":
        used = {w.name for w in self.windows} | {e.use for e in self.exceptions}
        for name in sorted(used - set(self.shares)):
            raise ValueError(f"window {name} has no shares{suggest(name, self.shares)}")
        for window, shares in self.shares.items():
            for role, share in shares.items():
                self._share_fits(window, role, share)
        if self.learning is not None:
            for role in (self.learning.rollout, self.learning.trainer):
                if role not in self.roles:
                    raise ValueError(f"learning names the role {role}{suggest(role, self.roles)}")
        return self

    def _share_fits(self, window: str, name: str, share: Share) -> None:
        if name not in self.roles:
            raise ValueError(f"shares.{window} names the role {name}{suggest(name, self.roles)}")
        role = self.roles[name]
        for key, num_gpus in (("min", share.min), ("target", share.target), ("max", share.most)):
            if not role.allows(num_gpus):
                fits = [n for n in range(self.pool.num_gpus + 1) if role.allows(n)]
                near = sorted(sorted(fits, key=lambda n: abs(n - num_gpus))[:2])
                raise ValueError(
                    f"shares.{window}.{name}: {key} {num_gpus} is no size of {name} (gpus_per_replica, sizes, "
                    f"global_batch); the nearest are {' and '.join(map(str, near))}."
                )

    def share(self, window: str, role: str) -> Share:
        return self.shares[window].get(role, NO_SHARE)

    @functools.cached_property
    def ranked(self) -> tuple[str, ...]:
        """Roles, the highest priority first."""
        return tuple(sorted(self.roles, key=lambda name: (-self.roles[name].priority, name)))


Shares = Mapping[str, Share]  # role -> share, of one window


def parse_pool(data: dict, *, source: str) -> PoolConfig:
    """A pool whose every sentence is right; whether its windows cover the week is `checks.check_calendar`'s."""
    return parse(PoolConfig, data, source=source)


def read_pool(path: Path) -> PoolConfig:
    """Read a YAML pool. Raises ValueError with the key and the nearest known name on any mistake."""
    return parse_pool(read_mapping(path, what="a pool", sections="pool, windows, shares, roles, ..."), source=str(path))
