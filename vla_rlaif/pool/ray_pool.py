"""The pool on Ray: what is there, and how orders are given. The only module of the pool that imports Ray.

A replica is a detached actor `<pool>/<role>/<replica>` in a detached placement group of the same name; who has which
GPUs is on the board, the detached actor `<pool>/board`. Nothing else is kept anywhere, and every wait has a deadline.
"""

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns about its own future

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util import list_named_actors
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vla_rlaif.envs.egl_devices import egl_device
from vla_rlaif.pool.board import Board, Entry
from vla_rlaif.pool.observe import Heard
from vla_rlaif.pool.replica import Answer, Claim, Order, Replica, Status
from vla_rlaif.pool.state import Gpu, Node
from vla_rlaif.pool.work import Kind, Work, duty_of

NAMESPACE = "vla_rlaif_pool"
CALL_S = 5.0  # what is not answered by then is asked again by the next plan
START_S = 60.0  # for the board, whose actor may have to start
NICE = 10  # of what trains and collects: robots wait for nobody
CALL_ERROR = RayError  # what a call raises whose answer does not come: the next look tries again
THREADS = 8  # of an actor: it answers while it carries something out


class SupersededError(Exception):
    """A newer scheduler is in charge: this one must not act."""


class ReplicaActor:
    """A replica, made where its GPUs are."""

    def __init__(self, kind: Kind, claim: Claim, work: Work, address: str) -> None:
        if kind != "serve":
            os.nice(NICE)
        ids = tuple(int(i) for i in ray.get_gpu_ids())
        if ids and (device := egl_device(str(ids[0]))) is not None:
            os.environ["MUJOCO_EGL_DEVICE_ID"] = str(device)
        self._replica = Replica(claim, duty_of(kind, claim, work, address), work.audit, ids)

    def apply(self, token: int, order: Order) -> Answer:
        return self._replica.apply(token, order)

    def status(self, token: int) -> Status:
        return self._replica.status(token)


class RayPool:
    """``connect`` (ray.init) is the caller's. ``pool`` names the pool within the cluster."""

    def __init__(self, pool: str, work: Work) -> None:
        self._pool, self._work = pool, work
        self._actor: Any = ray.remote(ReplicaActor)  # once: every such call sends the class to the cluster
        self._handles: dict[str, Any] = {}
        self._last: dict[str, tuple[Status, float]] = {}  # replica -> its last answer, and when
        self._board = self._find_board()

    def nodes(self, num_nodes: int, gpus_per_node: int) -> tuple[Node, ...]:
        """Nodes with GPUs by name, the dead ones included as long as Ray knows them."""
        alive: dict[str, int] = {}
        for node in ray.nodes():
            num_gpus = int(node["Resources"].get("GPU", 0)) if node["Alive"] else 0
            if num_gpus or not node["Alive"]:
                alive[node["NodeName"]] = max(alive.get(node["NodeName"], 0), num_gpus)
        chosen = sorted(alive, key=lambda name: (not alive[name], name))[:num_nodes]
        return tuple(
            Node(name=name, healthy=tuple(slot < alive[name] for slot in range(gpus_per_node)))
            for name in sorted(chosen)
        )

    def entries(self, token: int) -> dict[str, Entry]:
        """Of the board. To look shuts out older schedulers, here and in `listen`: what they ask for late is refused."""
        return {entry.claim.replica: entry for entry in self._ask(lambda board: board.entries.remote(token))}

    def generation(self) -> dict[Gpu, int]:
        return self._ask(lambda board: board.generation.remote())

    def listen(self, token: int, entries: Mapping[str, Entry]) -> dict[str, Heard]:
        """The status of every replica, or that it does not answer."""
        asked: dict[str, Any] = {}
        heard: dict[str, Heard] = {}
        for name, entry in entries.items():
            handle = self._handle(entry.claim)
            if handle is None:
                heard[name] = Heard(status=None, is_dead=entry.is_created)
            else:
                asked[name] = handle.status.remote(token)
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=CALL_S)
        for name, answer in asked.items():
            heard[name] = self._hear(name, answer)
        for name in set(self._last) - set(entries):
            del self._last[name]
            self._handles.pop(name, None)
        return heard

    def claim(self, token: int, key: str, claim: Claim) -> None:
        _obey(self._ask(lambda board: board.claim.remote(token, key, claim)))

    def release(self, token: int, key: str, name: str, *, kill: bool) -> None:
        _obey(self._ask(lambda board: board.release.remote(token, key, name, kill=kill)))

    def create(self, kind: Kind, claim: Claim) -> None:
        """The placement group and the actor of a claim. Both have names, so that doing it again changes nothing."""
        name = self._name(claim)
        nodes = {node["NodeName"]: node for node in ray.nodes() if node["Alive"]}
        counts = Counter(gpu.node for gpu in claim.gpus)
        if not set(counts) <= set(nodes):
            return  # a node has died since; the planner gives the claim up
        try:
            group = get_placement_group(name)
        except ValueError:
            group = placement_group(
                [{"GPU": float(n)} for n in counts.values()],
                strategy="STRICT_PACK" if len(counts) == 1 else "PACK",
                name=name,
                lifetime="detached",
                bundle_label_selector=[{"ray.io/node-id": nodes[node]["NodeID"]} for node in counts],
            )
        first = nodes[claim.gpus[0].node]
        self._actor.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            num_gpus=counts[claim.gpus[0].node],
            max_concurrency=THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        ).remote(kind, claim, self._work, first["NodeManagerAddress"])
        self._ask(lambda board: board.created.remote(claim.replica))

    def order(self, token: int, orders: Iterable[tuple[Claim, Order]]) -> None:
        """Give orders, all at once. One whose answer is lost may have been obeyed; it may be given again."""
        given: list[Any] = []
        for claim, order in orders:
            handle = self._handle(claim)
            if handle is not None:
                given.append(handle.apply.remote(token, order))
        if given:
            ray.wait(given, num_returns=len(given), timeout=CALL_S)
        for answer in given:
            try:
                _obey(_get(answer, 0.0))
            except (RayActorError, GetTimeoutError):
                continue

    def remove(self, token: int, claim: Claim) -> None:
        """End what is left of a replica, and wipe its claim."""
        name = self._name(claim)
        handle = self._handle(claim)
        if handle is not None:
            ray.kill(handle, no_restart=True)
        with contextlib.suppress(ValueError):  # it is gone, or never was
            remove_placement_group(get_placement_group(name))
        self._handles.pop(claim.replica, None)
        _obey(self._ask(lambda board: board.wipe.remote(token, claim.replica)))

    def _find_board(self) -> Any:
        board: Any = (
            ray.remote(Board)
            .options(
                name=f"{self._pool}/board",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
            )
            .remote(self._work.audit)
        )
        if not _get(board.entries.remote(0), START_S):  # a new one, or one made anew
            for name in list_named_actors():
                if name.startswith(f"{self._pool}/") and name != f"{self._pool}/board":
                    replica: Any = ray.get_actor(name, namespace=NAMESPACE)
                    status = _get(replica.status.remote(0), START_S)
                    _get(board.adopt.remote(status.claim), CALL_S)
        return board

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """The board's answer; from a new board if it died with its node."""
        try:
            return _get(question(self._board), CALL_S)
        except ActorUnavailableError:
            raise
        except RayActorError:
            self._board = self._find_board()
            return _get(question(self._board), CALL_S)

    def _handle(self, claim: Claim) -> Any | None:
        if claim.replica not in self._handles:
            try:
                self._handles[claim.replica] = ray.get_actor(self._name(claim), namespace=NAMESPACE)
            except ValueError:
                return None
        return self._handles[claim.replica]

    def _hear(self, name: str, answer: Any) -> Heard:
        now = time.monotonic()
        try:
            status = _get(answer, 0.0)
        except (ActorUnavailableError, GetTimeoutError):
            if name not in self._last:
                return Heard()
            status, at = self._last[name]
            return Heard(status=status, silent_s=now - at)
        except RayActorError:
            return Heard(status=self._last[name][0] if name in self._last else None, is_dead=True)
        self._last[name] = status, now
        return Heard(status=status)

    def _name(self, claim: Claim) -> str:
        return f"{self._pool}/{claim.role}/{claim.replica}"


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """To the Ray cluster at ``address``."""
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ValueError(f"no Ray cluster at {address!r}: start one (ray start --head), or give --address.") from error
    try:
        yield
    finally:
        ray.shutdown()


def tear_down(pool: str) -> None:
    """End everything of a pool at once."""
    for name in list_named_actors():
        if name.startswith(f"{pool}/"):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    for row in placement_group_table().values():
        if row["name"].startswith(f"{pool}/") and row["state"] != "REMOVED":
            remove_placement_group(get_placement_group(row["name"]))


def _get(answer: Any, timeout_s: float) -> Any:
    """What a reference becomes; Ray's types know nothing of actors."""
    return ray.get(answer, timeout=timeout_s)


def _obey(answer: Answer) -> None:
    if answer == "fenced":
        raise SupersededError("another scheduler has the lease.")
