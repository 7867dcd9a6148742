"""``ProcessVectorEnv``: any suite's single environments behind the ``VectorEnv`` seam, spread over worker processes.

N members, H actions in a chunk, K workers; member i belongs to worker i // ceil(N / K), so that most groups live in one
worker. Frames, states and actions are in shared memory. A worker that hangs or dies is replaced: the members that it
was playing are invalid until the next reset. A member whose env raises is invalid alone. Neither is ever waited for
longer than ``timeout_s``. Linux only.
"""

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.envs.arguments import check_chunk, check_seeds
from vla_rlaif.envs.shared_arrays import SharedArrays
from vla_rlaif.envs.single import SingleSpec
from vla_rlaif.envs.worker_process import WorkerFault, WorkerProcess, WorkerSpec, answers
from vla_rlaif.types import EnvSpec, Observation, Transition

_MAX_STARTS = 3  # tries to replace a worker, before the fault is taken for a permanent one


class ProcessVectorEnv:
    """Owns the workers and the episode book-keeping. Knows no suite."""

    def __init__(
        self,
        worker: WorkerSpec,
        *,
        num_envs: int,
        num_workers: int,
        chunk: int,
        start_timeout_s: float = 120.0,
        timeout_s: float = 60.0,
    ) -> None:
        """``start_timeout_s``: until a worker has imported its suite and built an env. ``timeout_s``: for one env step,
        one reset or one frame of one member.

        Raises ValueError for what a user can fix: the suite is not installed, its id or a key is not known.
        """
        for name, count in {"num_envs": num_envs, "num_workers": num_workers, "chunk": chunk}.items():
            if count < 1:
                raise ValueError(f"{name} is {count}; it must be at least 1.")
        self._num_envs, self._worker_spec = num_envs, worker
        self._start_timeout_s, self._timeout_s = start_timeout_s, timeout_s
        per_worker = -(-num_envs // min(num_workers, num_envs))
        self._members = [range(i, min(i + per_worker, num_envs)) for i in range(0, num_envs, per_worker)]
        self._faults = {"raised": 0, "hung": 0, "died": 0}
        self._last_fault = ""
        self._seconds = {"physics": 0.0, "render": 0.0}
        self._is_started = self._is_closed = False
        self._arrays_fd = os.memfd_create("vla_rlaif_envs", os.MFD_CLOEXEC)
        self._workers: list[WorkerProcess] = []
        self._starting = set(range(len(self._members)))
        self._single: SingleSpec | None = None
        # Dropping the last reference closes too: the finalizer holds the workers, not this object.
        self._close = weakref.finalize(self, _close, self._workers, self._arrays_fd)
        try:
            for index in range(len(self._members)):
                self._workers.append(WorkerProcess(worker, index, self._arrays_fd))
            self._greet(tries=1)
        except BaseException:
            self._close()
            raise
        assert self._single is not None
        self._spec = EnvSpec(
            cameras=self._single.cameras,
            image_size=self._single.image_size,
            state_dim=self._single.state_dim,
            action_dim=self._single.action_dim,
            chunk=chunk,
            max_decisions=-(-worker.max_steps // chunk),
            instructions=self._single.instructions,
            fps=self._single.fps,
            num_tasks=self._single.num_tasks,
            num_starts=self._single.num_starts,
        )

    @property
    def num_envs(self) -> int:
        return self._num_envs

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    @property
    def seconds(self) -> Mapping[str, float]:
        """Wall seconds spent so far, by "physics" and "render": of the slowest worker of each request."""
        return dict(self._seconds)

    @property
    def faults(self) -> Mapping[str, int]:
        """Members that lost an episode so far because an env "raised", and workers that "hung" or "died"."""
        return dict(self._faults)

    @property
    def last_fault(self) -> str:
        """What the latest fault said; empty if there was none."""
        return self._last_fault

    def reset(self, seeds: Int[np.ndarray, " N"]) -> Transition:
        """Start episodes; workers that were lost are back first. Members whose env failed here are done and invalid.

        Raises RuntimeError if not one member could be reset: at once if an env raised, or after some tries in which all
        workers died or hung.
        """
        check_seeds(seeds, self._num_envs)
        self._require_open()
        said = self._reset_all(seeds)
        sentences = self._spec.instructions
        self._instruction = [said.get(i, sentences[0]) for i in range(self._num_envs)]
        self._is_started = True
        return self._transition()

    def _reset_all(self, seeds: Int[np.ndarray, " N"]) -> dict[int, str]:
        a, raised = self._arrays, self._faults["raised"]
        for _ in range(_MAX_STARTS):
            self._greet()
            a.done[:], a.valid[:], a.success[:], a.truncated[:], a.truth[:] = True, False, False, False, 0
            a.executed[:] = 0
            said = self._request("reset", {i: int(s) for i, s in enumerate(seeds)})
            if said:
                return said
            if self._faults["raised"] > raised:
                break
        raise RuntimeError(f"no environment could be reset; the last one said: {self._last_fault}")

    def step(self, action: Float[np.ndarray, "N H A"]) -> Transition:
        """Execute a chunk of any length. Members that finish inside it are frozen there, in state and images."""
        if not self._is_started:
            raise ValueError("Call reset before step.")
        self._require_open()
        a = self._arrays
        check_chunk(action, a.done, self._spec.action_dim)
        live = np.flatnonzero(~a.done)
        length = min(action.shape[1], a.action.shape[1])  # no episode lasts longer
        a.action[live, :length] = np.clip(action[live, :length], -1, 1)
        a.executed[:] = 0
        for i, sentence in self._request("step", dict.fromkeys(live.tolist(), length)).items():
            self._instruction[i] = sentence
        return self._transition()

    def close(self) -> None:
        """End the workers. May be called twice."""
        self._is_closed = True
        self._close()

    def expert(self) -> Float[np.ndarray, "N A"]:
        """The suite's expert's action for one env step, float32; zeros for members that are done."""
        if not self._has_expert:
            raise ValueError(f"{self._name} has no expert; demonstrations need one. Start from a checkpoint instead.")
        self._arrays.expert[:] = 0
        self._request("expert", dict.fromkeys(self._live()))
        return self._arrays.expert.copy()

    def state_hash(self) -> tuple[str, ...]:
        """A digest of each member's state and step count, as far as the suite lets it be read; "invalid" of members
        whose env failed."""
        valid = np.flatnonzero(self._arrays.valid).tolist()
        said = self._request("hash", dict.fromkeys(valid))
        return tuple(said.get(i, "invalid") for i in range(self._num_envs))

    def snapshot(self, i: int) -> str:
        """One valid member at one moment, for ``restore``."""
        self._require_restorable()
        if not (said := self._request("snapshot", {i: None})):
            raise ValueError(f"member {i} has no snapshot: {self._last_fault}")
        return said[i]

    def restore(self, ids: Sequence[int] | Int[np.ndarray, " L"], snapshot: str) -> Transition:
        """Put one snapshot into the members ``ids``; how exactly, the suite's adapter says. The others keep what they
        have."""
        self._require_restorable()
        self._greet()
        self._is_started = True
        self._arrays.executed[:] = 0
        for i, sentence in self._request("restore", {int(i): snapshot for i in ids}).items():
            self._instruction[i] = sentence
        return self._transition()

    def _live(self) -> list[int]:
        return np.flatnonzero(~self._arrays.done).tolist()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("The env is closed; make a new one.")

    def _require_restorable(self) -> None:
        self._require_open()
        if not self._is_restorable:
            raise ValueError(f"{self._name} cannot take snapshots; restart a group by equal seeds.")

    def _request(self, op: str, arguments: Mapping[int, Any]) -> dict[int, str]:
        """Ask for something of some members; what each said. Members that failed are done and invalid afterwards."""
        asked = {}
        for worker, members in zip(self._workers, self._members, strict=True):
            mine = [i for i in members if i in arguments and worker.index not in self._starting]
            if mine:
                worker.ask(op, mine, [arguments[i] for i in mine])
                asked[worker.index] = mine
        said: dict[int, str] = {}
        found = answers([self._workers[k] for k in asked], self._arrays, self._timeout_s)
        for index, answer in found.items():
            if isinstance(answer, WorkerFault):
                self._count(answer.kind, str(answer), 1)
                self._lose(index)
                self._replace(index)
                continue
            said |= {int(i): text for i, text in answer["said"].items()}
            failed = [int(i) for i in answer["failed"]]
            if failed:
                self._count("raised", next(iter(answer["failed"].values())), len(failed))
                self._invalidate(failed)
        fine = [k for k, answer in found.items() if not isinstance(answer, WorkerFault)]
        if fine:
            self._seconds["physics"] += float(self._arrays.physics_s[fine].max())
            self._seconds["render"] += float(self._arrays.render_s[fine].max())
        return said

    def _count(self, kind: str, message: str, number: int) -> None:
        self._faults[kind] += number
        self._last_fault = message

    def _lose(self, index: int) -> None:
        """Members that a lost worker was playing; those that had finished keep their episode."""
        a = self._arrays
        self._invalidate([i for i in self._members[index] if not a.done[i] or i == a.busy[index]])

    def _invalidate(self, members: Sequence[int]) -> None:
        rows, a = np.array(members, int), self._arrays
        a.valid[rows], a.success[rows], a.truncated[rows], a.done[rows] = False, False, False, True
        a.executed[rows], a.truth[rows] = 0, 0

    def _replace(self, index: int) -> None:
        self._workers[index].end()
        self._workers[index] = WorkerProcess(self._worker_spec, index, self._arrays_fd)
        self._starting.add(index)

    def _greet(self, *, tries: int = _MAX_STARTS) -> None:
        """Wait for the workers that are starting."""
        for left in reversed(range(tries)):
            for index in sorted(self._starting):
                try:
                    said = self._workers[index].greeting(self._start_timeout_s)
                except WorkerFault as fault:
                    if fault.kind == "raised" or not left:
                        raise RuntimeError(str(fault)) from None
                    self._count(fault.kind, str(fault), 1)
                    self._replace(index)
                else:
                    self._welcome(index, said)

    def _welcome(self, index: int, said: Mapping[str, Any]) -> None:
        fields = said["spec"]
        sequences = {k: tuple(fields[k]) for k in ("cameras", "instructions")}  # JSON has lists only
        spec = SingleSpec(**(fields | sequences))
        if self._single is None:
            self._single, self._name = spec, said["name"]
            self._has_expert, self._is_restorable = said["has_expert"], said["is_restorable"]
            counts = {"num_envs": self._num_envs, "num_workers": len(self._members)}
            self._arrays = SharedArrays(self._arrays_fd, spec, max_steps=self._worker_spec.max_steps, **counts)
            self._arrays.done[:] = True  # nothing runs before reset
            self._instruction = [spec.instructions[0]] * self._num_envs
        assert spec == self._single, f"env worker {index} has another spec than the others: {spec}"
        self._workers[index].attach(num_envs=self._num_envs, num_workers=len(self._members))
        self._starting.discard(index)

    def _transition(self) -> Transition:
        a = self._arrays
        return Transition(
            obs=Observation(
                images={c: a.images[:, k].copy() for k, c in enumerate(self._spec.cameras)},
                state=a.state.copy(),
                instruction=tuple(self._instruction),
            ),
            done=a.done.copy(),
            truncated=a.truncated.copy(),
            success=a.success.copy(),
            truth=a.truth.copy(),
            executed=a.executed.astype(int),
            valid=a.valid.copy(),
        )


def _close(workers: list[WorkerProcess], arrays_fd: int) -> None:
    for worker in workers:
        worker.end()
    os.close(arrays_fd)
