"""Workers as Ray actors, on one machine or many. Of dist, only the modules `ray_cluster`, `ray_handle` and `ray_places`
import Ray. It restarts nothing by itself, and every wait has a deadline.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns about its own future

import ray

from vla_rlaif.cluster_config import RayClusterConfig, Role
from vla_rlaif.dist.answers import WorkerLost
from vla_rlaif.dist.cluster import Handle, WorkerContext, WorkerGroup, check_work, wait_until_built
from vla_rlaif.dist.fleet import Fleet
from vla_rlaif.dist.placement import Bundle, Seat
from vla_rlaif.dist.ray_actor import GROUPS, Assignment, WorkerActor, environment
from vla_rlaif.dist.ray_handle import Inbox, RayHandle, share_work
from vla_rlaif.dist.ray_places import Lent, RayPlaces, connect

PULSE_S = 1.0  # between pings


class RayCluster:
    """A Cluster on Ray. Nothing is started before everything is placed."""

    def __init__(
        self,
        config: RayClusterConfig,
        *,
        folder: Path | None = None,
        logs: Path | None = None,
        lent: Sequence[Lent] = (),
    ) -> None:
        """Connect, and reserve what the roles ask for; with ``lent`` places, use those instead. Workers run in
        ``folder``, by default the current one, and print into files of ``logs``; both are on a file system that the
        nodes share.

        Raises:
            ValueError: there is no cluster, or the roles do not fit on it.
        """
        self._config, self._folder, self._logs = config, (folder or Path.cwd()).absolute(), logs
        as_actor: Any = ray.remote  # its types know no concurrency groups
        self._actor = as_actor(concurrency_groups=GROUPS)(WorkerActor)
        self._handles: list[RayHandle[Any]] = []
        self._fleets: list[Fleet] = []
        self._closing = threading.Event()
        self._inbox: Inbox = queue.SimpleQueue()
        self._owns_ray = connect(config.address)
        try:
            self._places = RayPlaces(config, lent)
        except BaseException:
            self._disconnect()
            raise
        threading.Thread(target=self._listen, daemon=True, name="answers").start()
        threading.Thread(target=self._watch, daemon=True, name="pulse").start()

    def start[W](self, role: str, make: Callable[[WorkerContext], W], num: int) -> WorkerGroup[W]:
        check_work(make)
        seats, faults = self._places.seats(role), self._config.faults
        assert len(seats) == num > 0, f"{num} workers of {role} are asked for, and {len(seats)} have a place"
        health = Fleet(
            [seat.name for seat, _ in seats],
            clock=time.monotonic,
            suspect_s=faults.silent_s / 2,
            dead_s=faults.silent_s,
        )

        def make_all(wanted: Sequence[tuple[Seat, Bundle]], incarnation: int) -> list[RayHandle[W]]:
            gpus = self._shared_gpus([bundle for _, bundle in wanted])
            handles = []
            for seat, bundle in wanted:
                seen = tuple(gpus[bundle.name][slot] for slot in seat.slots) if bundle.name in gpus else None
                handles.append(self._start_one(seat, bundle, incarnation, num, make, health, seen))
            wait_until_built(handles, [handle.built for handle in handles], faults.start_timeout_s)
            return handles

        def respawn(old: Handle[W], incarnation: int) -> Handle[W]:
            [pair] = [(seat, bundle) for seat, bundle in seats if seat.name == old.name]
            return make_all([pair], incarnation)[0]

        self._fleets.append(health)
        return WorkerGroup(
            role,
            make_all(seats, 0),
            health=health,
            respawn=respawn,
            max_restarts=faults.max_restarts,
            share=share_work,
        )

    def lend(self, role: Role, index: int, num: int) -> tuple[Lent, ...]:
        """The ``index``-th of ``num`` equal parts of the places of a role whose workers another process starts, such as
        a rollout worker its env workers. They are numbered anew, and stay reserved until this cluster closes."""
        return self._places.lend(role, index, num)

    def close(self) -> None:
        self._closing.set()
        self._inbox.put(None)
        for handle in self._handles:
            handle.kill()
        self._places.close()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    def _shared_gpus(self, bundles: Sequence[Bundle]) -> dict[str, tuple[str, ...]]:
        """Of bundles whose workers share GPUs, or have none. Ray gives a GPU to one process only, or counts in parts of
        one; so none of them asks Ray for any, and each is told what to see."""
        shared = {bundle.name: bundle for bundle in bundles if bundle.gpus and len(bundle.seats) > 1}
        return self._places.gpus(list(shared.values())) | {bundle.name: () for bundle in bundles if not bundle.gpus}

    def _start_one(
        self,
        seat: Seat,
        bundle: Bundle,
        incarnation: int,
        num: int,
        make: Callable[[WorkerContext], Any],
        health: Fleet,
        gpus: tuple[str, ...] | None,
    ) -> RayHandle[Any]:
        """``gpus`` that it sees; None: whatever Ray gives it of its bundle."""
        if self._closing.is_set():
            raise WorkerLost(seat.name, "its cluster is closed")
        home = self._places.home(bundle)
        role = self._config.roles.present()[seat.role]
        variables = environment(threads=role.num_threads, gpus=gpus, share=seat.share, sends=seat.role == "learner")
        log = None if self._logs is None else self._logs.absolute() / f"{seat.role}-{seat.index}.log"
        actor = self._actor.options(
            num_cpus=0,  # the placement group holds them
            num_gpus=bundle.gpus if gpus is None else 0,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": variables},
            scheduling_strategy=home.strategy,
        ).remote()
        handle: RayHandle[Any] = RayHandle(actor, seat.name, incarnation, health=health, inbox=self._inbox, output=log)
        assignment = Assignment(
            role=seat.role,
            index=seat.index,
            num=num,
            incarnation=incarnation,
            node=home.name,
            address=home.address,
            folder=self._folder,
            log=log,
        )
        handle.build(make, assignment)
        self._handles.append(handle)
        return handle

    def _listen(self) -> None:
        """Ray tells of answers on its own threads, which must not wait for Ray."""
        while (item := self._inbox.get()) is not None:
            handle, answer, came = item
            handle.take(answer, came)

    def _watch(self) -> None:
        """Ping all workers for as long as the cluster is open, and end those that are silent for too long."""
        while not self._closing.wait(PULSE_S):
            for fleet in self._fleets:
                fleet.look()
            for handle in self._handles:
                handle.look()
