"""``RemoteVectorEnv``: a vector env whose members live in workers of a cluster, some in each.

N members, H actions in a chunk, A action dims; the members of a worker follow those of the worker before. A worker that
dies, raises or does not answer in time costs its members the episode that they were playing: they are done and invalid
until the next reset, which replaces the worker. The others notice nothing.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.dist.answers import WorkerError, WorkerFailure, WorkerLate, answers, outcomes
from vla_rlaif.dist.cluster import Cluster, WorkerGroup
from vla_rlaif.dist.env_worker import EnvAnswer, EnvHello, EnvWorker, make_env_worker
from vla_rlaif.env_config import EnvConfig, ProcessEnvConfig, TabletopConfig
from vla_rlaif.envs.arguments import check_chunk, check_seeds
from vla_rlaif.envs.halves import Halves
from vla_rlaif.envs.joined import joined, lost, merged, untouched
from vla_rlaif.types import EnvSpec, Transition


def start_remote_env(
    cluster: Cluster,
    config: EnvConfig,
    *,
    num_workers: int,
    timeout_s: float,
    role: str = "env",
    max_steps: int | None = None,
) -> "RemoteVectorEnv | Halves":
    """The members of ``config``, spread over ``num_workers`` workers that it starts as ``role``.

    Raises ValueError for what a user can fix: counts that do not fit, or a mistake in the config.
    """
    is_halved = isinstance(config, TabletopConfig | ProcessEnvConfig) and config.double_buffer and max_steps is None
    if num_workers > config.num_envs:
        raise ValueError(f"{num_workers} env workers for {config.num_envs} members; each needs one at least.")
    if is_halved and (num_workers % 2 or config.num_envs % num_workers):
        raise ValueError(
            f"double_buffer wants {num_workers} env workers and {config.num_envs} members to split into equal halves."
        )
    group = cluster.start(role, partial(make_env_worker, config=config, max_steps=max_steps), num_workers)
    if not is_halved:
        return RemoteVectorEnv(group, timeout_s=timeout_s)
    middle = num_workers // 2
    first = RemoteVectorEnv(group, timeout_s=timeout_s, workers=range(middle))
    return Halves(first, RemoteVectorEnv(group, timeout_s=timeout_s, workers=range(middle, num_workers)))


class RemoteVectorEnv:
    """Owns its workers and knows what each has answered last. Never waits longer than ``timeout_s`` for one."""

    def __init__(
        self, group: WorkerGroup[EnvWorker], *, timeout_s: float, workers: Sequence[int] | None = None
    ) -> None:
        """``workers`` of the group, by index; None: all. ``timeout_s``: for one request of all members of a worker."""
        self._group, self._timeout_s = group, timeout_s
        self._indices = list(range(len(group.handles)) if workers is None else workers)
        handles = self._handles
        hellos = answers([handle.ask(EnvWorker.hello) for handle in handles], timeout_s, "telling its env")
        self._hello: EnvHello = hellos[0]
        for handle, hello in zip(handles, hellos, strict=True):
            assert hello.spec == self._hello.spec, f"{handle.name} has another spec than the others: {hello.spec}"
        ends = np.cumsum([hello.num_envs for hello in hellos]).tolist()
        self._rows = [slice(end - hello.num_envs, end) for end, hello in zip(ends, hellos, strict=True)]
        self._num_envs = ends[-1]
        self._parts: list[Transition] = []  # what each worker's members show; empty before the first reset
        self._dead: set[int] = set()  # workers that the next reset replaces
        self._seconds = {"physics": 0.0, "render": 0.0}
        self._faults = Counter[str](raised=0, hung=0, died=0)
        self._last_fault = ""
        self._is_closed = False

    @property
    def num_envs(self) -> int:
        return self._num_envs

    @property
    def spec(self) -> EnvSpec:
        return self._hello.spec

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall seconds spent so far, by "physics" and "render": of the slowest worker of each request."""
        return dict(self._seconds)

    @property
    def faults(self) -> Mapping[str, int]:
        """Those of the workers' envs, and workers whose env "raised" as a whole, that "hung" or "died"."""
        return dict(self._faults)

    @property
    def last_fault(self) -> str:
        """What the latest fault of a worker said; empty if there was none."""
        return self._last_fault

    def reset(self, seeds: Int[np.ndarray, " N"]) -> Transition:
        """Start episodes; workers that were lost are back first. Members of one that fails here are done and invalid.

        Raises RuntimeError if not one member could be reset, WorkerFailure if a worker cannot be replaced.
        """
        check_seeds(seeds, self._num_envs)
        self._require_open()
        self._revive()
        spec, parts = self._hello.spec, list(range(len(self._rows)))
        self._parts = self._parts or [untouched(spec, rows.stop - rows.start) for rows in self._rows]
        self._parts = [lost(part, np.ones(len(part.done), bool)) for part in self._parts]
        self._ask(parts, [partial(EnvWorker.reset, seeds=seeds[rows]) for rows in self._rows], "a reset")
        if not any(part.valid.any() for part in self._parts):
            raise RuntimeError(f"no environment could be reset; the last one said: {self._last_fault}")
        return joined(self._parts)

    def step(self, action: Float[np.ndarray, "N H A"]) -> Transition:
        """Execute a chunk of any length. Workers without a live member are not asked."""
        if not self._parts:
            raise ValueError("Call reset before step.")
        self._require_open()
        check_chunk(action, np.concatenate([part.done for part in self._parts]), self.spec.action_dim)
        live = [k for k, part in enumerate(self._parts) if not part.done.all()]
        self._parts = [replace(part, executed=np.zeros_like(part.executed)) for part in self._parts]
        self._ask(live, [partial(EnvWorker.step, action=action[self._rows[k]]) for k in live], "a chunk")
        return joined(self._parts)

    def expert(self) -> Float[np.ndarray, "N A"]:
        """The expert's action for one env step, float32; zeros for members of lost workers."""
        if not self._hello.has_expert:
            raise ValueError(f"{self._hello.name} has no expert; demonstrations need one. Start from a checkpoint.")
        found = np.zeros((self._num_envs, self.spec.action_dim), np.float32)
        for k, action in self._query(EnvWorker.expert, "the expert's action").items():
            found[self._rows[k]] = action
        return found

    def state_hash(self) -> tuple[str, ...]:
        """A digest of each member's state, as its env makes it; "invalid" of members of lost workers."""
        self._require_restorable()
        found = ["invalid"] * self._num_envs
        for k, hashes in self._query(EnvWorker.state_hash, "hashes").items():
            found[self._rows[k]] = hashes
        return tuple(found)

    def snapshot(self, i: int) -> Any:
        """Of one member, for ``restore`` into any."""
        self._require_restorable()
        [(k, local)] = [(k, i - rows.start) for k, rows in enumerate(self._rows) if rows.start <= i < rows.stop]
        found = self._query(partial(EnvWorker.snapshot, i=local), "a snapshot", only=k)
        if k not in found:
            raise ValueError(f"member {i} has no snapshot: {self._last_fault}")
        return found[k]

    def restore(self, ids: Sequence[int] | Int[np.ndarray, " L"], snapshot: Any) -> Transition:
        """Put one snapshot into the members ``ids``; the others keep what they have."""
        self._require_restorable()
        if not self._parts:
            raise ValueError("Call reset before restore.")
        self._revive()
        self._parts = [replace(part, executed=np.zeros_like(part.executed)) for part in self._parts]
        members = np.asarray(ids, int)
        local = [members[(members >= r.start) & (members < r.stop)] - r.start for r in self._rows]
        asked = [k for k, mine in enumerate(local) if len(mine)]
        work = [partial(EnvWorker.restore, ids=local[k].tolist(), snapshot=snapshot) for k in asked]
        self._ask(asked, work, "a restore", only={k: local[k] for k in asked})
        return joined(self._parts)

    def close(self) -> None:
        """End the workers. May be called twice."""
        self._is_closed = True
        for handle in self._handles:
            handle.kill()

    @property
    def _handles(self) -> list[Any]:
        return [self._group.handles[index] for index in self._indices]

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("The env is closed; make a new one.")

    def _require_restorable(self) -> None:
        self._require_open()
        if not self._hello.is_restorable:
            raise ValueError(f"{self._hello.name} cannot take snapshots; restart a group by equal seeds.")

    def _ask(
        self,
        parts: Sequence[int],
        work: Sequence[Callable[[EnvWorker], EnvAnswer]],
        doing: str,
        only: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        """Ask workers at the same time, and take over what they answer; of ``only`` some of their members, if given."""
        handles = self._handles
        asked = [handles[k].ask(each) for k, each in zip(parts, work, strict=True)]
        spent: list[Mapping[str, float]] = []
        for k, found in zip(parts, outcomes(asked, self._timeout_s, doing), strict=True):
            if isinstance(found, WorkerFailure):
                self._lose(k, found)
                continue
            now = found.now
            self._parts[k] = now if only is None else merged(self._parts[k], now, only[k])
            self._faults.update(found.faults)
            spent.append(found.seconds)
        for part in self._seconds:
            self._seconds[part] += max((seconds.get(part, 0.0) for seconds in spent), default=0.0)

    def _query[T](self, work: Callable[[EnvWorker], T], doing: str, only: int | None = None) -> dict[int, T]:
        """The answers of the living workers, by their number here."""
        self._require_open()
        living = [k for k in range(len(self._rows)) if k not in self._dead and only in (None, k)]
        handles = self._handles
        found = outcomes([handles[k].ask(work) for k in living], self._timeout_s, doing)
        good: dict[int, T] = {}
        for k, answer in zip(living, found, strict=True):
            if isinstance(answer, WorkerError) and answer.kind == "ValueError":
                raise ValueError(answer.reason)  # a refusal, which changes nothing
            if isinstance(answer, WorkerFailure):
                self._lose(k, answer)
            else:
                good[k] = answer
        return good

    def _lose(self, k: int, failure: WorkerFailure) -> None:
        """A worker whose env raised is replaced too: what state it is in, nobody knows."""
        kinds = {WorkerError: "raised", WorkerLate: "hung"}
        self._faults[kinds.get(type(failure), "died")] += 1
        self._last_fault = str(failure)
        self._dead.add(k)
        self._handles[k].kill()
        if self._parts:
            self._parts[k] = lost(self._parts[k], ~self._parts[k].done)

    def _revive(self) -> None:
        """Replace the workers that were lost, all at the same time."""
        if not self._dead:
            return
        handles = self._handles
        with ThreadPoolExecutor(len(self._dead)) as threads:
            list(threads.map(self._group.restart, [handles[k] for k in sorted(self._dead)]))
        self._dead.clear()
