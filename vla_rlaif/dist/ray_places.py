"""Places on a Ray cluster: one placement group a bundle, on the node that was chosen for it, with whole GPUs."""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns about its own future

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vla_rlaif.cluster_config import RayClusterConfig, Role
from vla_rlaif.dist.answers import WorkerLate, WorkerLost
from vla_rlaif.dist.placement import Bundle, Node, Seat, bundles_of, place


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where a bundle lies."""

    node: Node
    name: str  # of the node
    address: str
    group: PlacementGroup

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """What brings an actor there."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0)


@dataclass(frozen=True, kw_only=True)
class Lent:
    """A place that one process has reserved and another one uses."""

    bundle: Bundle
    home: Home


class RayPlaces:
    """Who lies where. Safe to use from any thread once it is made."""

    def __init__(self, config: RayClusterConfig, lent: Sequence[Lent]) -> None:
        """Reserve what the roles ask for; with ``lent`` places, use those instead.

        Raises:
            ValueError: the roles do not fit.
        """
        self._spread, self._timeout_s = config.strategy == "spread", config.faults.start_timeout_s
        self._bundles = tuple(each.bundle for each in lent) or bundles_of(config)
        self._homes = {each.bundle.name: each.home for each in lent}
        self._owns_homes = not lent
        self._moving = threading.Lock()
        if self._owns_homes:
            try:
                self._settle(self._bundles, self._choose(self._bundles, {}))
            except BaseException:
                self.close()
                raise

    def seats(self, role: str) -> list[tuple[Seat, Bundle]]:
        """Of a role, by the index of the worker."""
        seats = [(seat, bundle) for bundle in self._bundles for seat in bundle.seats if seat.role == role]
        return sorted(seats, key=lambda pair: pair[0].index)

    def home(self, bundle: Bundle) -> Home:
        """Of a bundle; a new one if its node has died.

        Raises:
            ValueError: there is no other node for it.
            WorkerLost: the place was lent.
        """
        with self._moving:
            living, home = living_nodes(), self._homes[bundle.name]
            if home.node.name in living:
                return home
            if not self._owns_homes:
                raise WorkerLost(bundle.name, f"node {home.name} is dead, and its place was lent")
            others = {name: each for name, each in self._homes.items() if name != bundle.name}
            where = self._choose([bundle], others)
            remove_placement_group(home.group)
            self._settle([bundle], where)
            return self._homes[bundle.name]

    def gpus(self, bundles: Sequence[Bundle]) -> dict[str, tuple[str, ...]]:
        """By bundle, the GPUs that it got, by slot: the same for as long as it has its place. Ray tells them only to
        processes there, so one is started in each."""
        homes = {bundle.name: self.home(bundle) for bundle in bundles}
        asked = {bundle.name: _ask_gpus(homes[bundle.name], bundle.gpus) for bundle in bundles}
        end, found = time.monotonic() + self._timeout_s, {}
        for name, ref in asked.items():
            try:
                found[name] = ray.get(ref, timeout=max(end - time.monotonic(), 1.0))
            except GetTimeoutError:
                doing = f"being told its GPUs by node {homes[name].name}"
                raise WorkerLate(name, doing, self._timeout_s) from None
        return found

    def lend(self, role: Role, index: int, num: int) -> tuple[Lent, ...]:
        """The ``index``-th of ``num`` equal parts of the places of a role, numbered anew."""
        seats = self.seats(role)
        each = len(seats) // num
        return tuple(
            Lent(bundle=replace(bundle, seats=(replace(seat, index=i),)), home=self._homes[bundle.name])
            for i, (seat, bundle) in enumerate(seats[index * each : (index + 1) * each])
        )

    def close(self) -> None:
        """Give back what was reserved here, which ends the actors there."""
        if self._owns_homes:
            for home in self._homes.values():
                remove_placement_group(home.group)

    def _choose(self, bundles: Sequence[Bundle], taken: Mapping[str, Home]) -> dict[str, str]:
        """Nodes for ``bundles`` beside those that have homes."""
        free = {name: node for name, (_, node) in living_nodes().items()}
        for each in self._bundles:
            if each.name in taken and taken[each.name].node.name in free:
                node = taken[each.name].node.name
                free[node] = each.taken_from(free[node])
        return place(bundles, list(free.values()), spread=self._spread)

    def _settle(self, bundles: Sequence[Bundle], where: Mapping[str, str]) -> None:
        """Reserve bundles on nodes, all at the same time."""
        nodes, end = living_nodes(), time.monotonic() + self._timeout_s
        for bundle in bundles:
            info, node = nodes[where[bundle.name]]
            wanted = {"CPU": bundle.cpus, "GPU": float(bundle.gpus), "memory": bundle.memory_gb * 2**30}
            group = placement_group(
                [{name: amount for name, amount in wanted.items() if amount}],
                strategy="STRICT_PACK",
                bundle_label_selector=[{"ray.io/node-id": node.name}],
            )
            self._homes[bundle.name] = Home(
                node=node, name=info["NodeName"], address=info["NodeManagerAddress"], group=group
            )
        for bundle in bundles:
            if not self._homes[bundle.name].group.wait(max(end - time.monotonic(), 1.0)):
                raise ValueError(_not_free(bundle, self._homes[bundle.name], self._timeout_s))


def connect(address: str) -> bool:
    """True: this call has connected; False: the process was connected already, and stays so.

    Raises:
        ValueError: there is no cluster.
    """
    if ray.is_initialized():
        return False
    if address == "local":
        # Else Ray starts as many processes as there are CPUs, none of which suits a worker with its own variables.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    dashboard = False if address == "local" else None  # None: as that cluster has it
    try:
        ray.init(address=address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ValueError(
            f"no Ray cluster at cluster.address {address!r}: start one (ray start --head), or use local."
        ) from error
    return True


def living_nodes() -> dict[str, tuple[dict[str, Any], Node]]:
    """By id, as Ray describes them and as the placement does."""
    return {node["NodeID"]: (node, _node(node)) for node in ray.nodes() if node["Alive"]}


def _node(node: dict[str, Any]) -> Node:
    resources = node["Resources"]
    return Node(
        name=node["NodeID"],
        cpus=resources.get("CPU", 0.0),
        gpus=int(resources.get("GPU", 0)),
        memory_gb=resources.get("memory", 0.0) / 2**30,
        labels=node["Labels"],
    )


def _not_free(bundle: Bundle, home: Home, timeout_s: float) -> str:
    free = ray.available_resources()
    return (
        f"{bundle.name} wants {bundle.gpus} GPUs and {bundle.cpus:g} CPUs of node {home.name}, which has "
        f"{home.node.gpus} and {home.node.cpus:g}, but did not get them within {timeout_s:g} s: others use them. In "
        f"the whole cluster {free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs are free."
    )


def _ask_gpus(home: Home, num_gpus: int) -> Any:
    """A reference to them."""
    look: Any = ray.remote(_gpu_ids).options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=home.strategy)
    return look.remote()


def _gpu_ids() -> tuple[str, ...]:
    """On the node: the GPUs that a bundle has got."""
    return tuple(str(gpu) for gpu in ray.get_gpu_ids())
