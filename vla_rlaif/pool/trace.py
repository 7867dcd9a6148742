"""What happens to a pool from outside: failures, jobs, load. Generated from a seed, or read from a JSON-lines trace.

One event a line: {"at": "2026-11-02T13:05", "type": "node_down", "node": "node-3"}. Times are the wall clock of the
pool's zone, or carry an offset.
"""

import json
import random
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple
from zoneinfo import ZoneInfo

from pydantic import Field, TypeAdapter, ValidationError

from vla_rlaif.pool.clock import DAY, Micros, resolve, to_local, to_micros
from vla_rlaif.pool.config import Duration, PoolConfig, Positive
from vla_rlaif.schema import Model


class NodeDown(Model):
    type: Literal["node_down"] = "node_down"
    node: str


class NodeUp(Model):
    type: Literal["node_up"] = "node_up"
    node: str


class GpuDown(Model):
    type: Literal["gpu_down"] = "gpu_down"
    node: str
    slot: Annotated[int, Field(ge=0)]


class GpuUp(Model):
    type: Literal["gpu_up"] = "gpu_up"
    node: str
    slot: Annotated[int, Field(ge=0)]


class JobSubmitted(Model):
    type: Literal["job"] = "job"
    name: str
    role: str
    num_gpus: Positive
    runtime: Duration
    min_runtime: Duration = 0
    one_node: bool = False


class Load(Model):
    """Requests that arrive from now on, as the number of GPUs they would keep fully busy."""

    type: Literal["load"] = "load"
    role: str
    gpus: Annotated[float, Field(ge=0)]


class ClockStep(Model):
    """The scheduler's wall clock jumps; negative goes back."""

    type: Literal["clock_step"] = "clock_step"
    seconds: float


class SchedulerDown(Model):
    """Nobody plans for so long; then a scheduler starts that remembers nothing."""

    type: Literal["scheduler_down"] = "scheduler_down"
    duration: Duration


class WeightSync(Model):
    """All active replicas that follow the committed weights take part in a sync of this length."""

    type: Literal["weight_sync"] = "weight_sync"
    duration: Duration


Event = NodeDown | NodeUp | GpuDown | GpuUp | JobSubmitted | Load | ClockStep | SchedulerDown | WeightSync
EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="type")])


class Timed(NamedTuple):
    at: Micros  # true time, whatever the scheduler's clock says
    event: Event


def node_names(config: PoolConfig) -> list[str]:
    return [f"node-{i}" for i in range(config.pool.nodes)]


def node_failures(
    config: PoolConfig, *, start: Micros, end: Micros, per_day: float, repair: Micros, seed: int
) -> list[Timed]:
    """One failure in each 1 / per_day of a day, at a random moment, of a random node that is up."""
    if per_day <= 0:
        return []
    rng, events, back = random.Random(f"failures:{seed}"), [], dict.fromkeys(node_names(config), start)
    step = round(DAY / per_day)
    for begin in range(start, end, step):
        at, draw = begin + rng.randrange(step), rng.random()
        up = [node for node, since in back.items() if since <= at]
        if at >= end or not up:
            continue
        node = up[int(draw * len(up))]
        back[node] = at + repair
        events += [Timed(at, NodeDown(node=node)), Timed(at + repair, NodeUp(node=node))]
    return sorted(events, key=lambda timed: timed.at)


def read_trace(path: Path, zone: ZoneInfo) -> list[Timed]:
    """Events of a JSON-lines file, sorted by time. Raises ValueError with the line of a mistake."""
    events = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            events.append(_parse(line, f"{path}:{number}", zone))
    return sorted(events, key=lambda timed: timed.at)


def write_trace(path: Path, events: Iterable[Timed], zone: ZoneInfo) -> None:
    """What `read_trace` reads back equal (to the millisecond)."""
    lines = []
    for at, event in events:
        fields = event.model_dump(mode="json")
        for name in {"runtime", "min_runtime", "duration"} & set(fields):
            fields[name] = f"{round(fields[name] / 1000)}ms"
        lines.append(json.dumps({"at": to_local(at, zone).isoformat()} | fields))
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _parse(line: str, where: str, zone: ZoneInfo) -> Timed:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("at"), str):
        raise ValueError(f'{where}: an event is an object with "at" (a time) and "type", got {line[:80]}')
    try:
        moment = datetime.fromisoformat(data.pop("at"))
        event = EVENT.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"{where}: at: {error}") from None
    return Timed(resolve(moment, zone) if moment.tzinfo is None else to_micros(moment), event)


def check_events(events: Sequence[Timed], config: PoolConfig) -> None:
    """Raises ValueError for nodes, slots and roles that the pool does not have."""
    nodes = node_names(config)
    for _, event in events:
        if isinstance(event, NodeDown | NodeUp | GpuDown | GpuUp) and event.node not in nodes:
            raise ValueError(f"the trace names {event.node}; the nodes are {nodes[0]} to {nodes[-1]}.")
        if isinstance(event, GpuDown | GpuUp) and event.slot >= config.pool.gpus_per_node:
            raise ValueError(f"the trace names GPU {event.slot}; a node has GPUs 0 to {config.pool.gpus_per_node - 1}.")
        if isinstance(event, JobSubmitted | Load) and event.role not in config.roles:
            raise ValueError(f"the trace names the role {event.role}; the roles are {', '.join(config.ranked)}.")
