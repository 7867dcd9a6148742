"""Which worker goes on which node and GPU. Pure.

Workers that share GPUs form a bundle, which lies on one node and has whole GPUs; a worker of a role without GPUs is a
bundle by itself. Bundles are then fitted onto nodes. What cannot fit is refused here, because Ray would wait for ever.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vla_rlaif.cluster_config import NodesConfig, RayClusterConfig, Role, RoleConfig

MAX_STEPS = 20_000  # of the search for a placement


@dataclass(frozen=True, kw_only=True)
class Node:
    """What a node has, or has left."""

    name: str
    cpus: float
    gpus: int = 0
    memory_gb: float | None = None  # of the host; None: not counted
    gpu_memory_gb: float | None = None  # of one GPU, where that is known
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One worker in a bundle."""

    role: Role
    index: int  # of the worker
    slots: tuple[int, ...] = ()  # GPUs of the bundle that it sees
    share: float = 1.0  # of the memory of each

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Workers that lie together, and what they take from a node."""

    seats: tuple[Seat, ...]
    cpus: float
    gpus: int
    memory_gb: float
    labels: Mapping[str, str]

    @property
    def name(self) -> str:
        """That of its first worker."""
        return self.seats[0].name

    @property
    def wants(self) -> tuple[float, int, float, tuple[tuple[str, str], ...]]:
        """Equal for bundles that can change places."""
        return self.cpus, self.gpus, self.memory_gb, tuple(sorted(self.labels.items()))

    def fits(self, node: Node) -> bool:
        return (
            self.gpus <= node.gpus
            and self.cpus <= node.cpus + 1e-9
            and (node.memory_gb is None or self.memory_gb <= node.memory_gb + 1e-9)
            and all(node.labels.get(key) == value for key, value in self.labels.items())
        )

    def taken_from(self, node: Node) -> Node:
        memory = None if node.memory_gb is None else node.memory_gb - self.memory_gb
        return replace(node, cpus=node.cpus - self.cpus, gpus=node.gpus - self.gpus, memory_gb=memory)


def bundles_of(cluster: RayClusterConfig) -> tuple[Bundle, ...]:
    """All bundles of a run, those of the learner first.

    Raises:
        ValueError: workers ask for more of a GPU than there is.
    """
    roles = cluster.roles.present()
    found: list[Bundle] = []
    for host, config in roles.items():
        if cluster.host_of(host) != host:
            continue
        guests: dict[Role, RoleConfig] = {
            name: role for name, role in roles.items() if name != host and cluster.host_of(name) == host
        }
        num_gpus = max(1, int(config.gpus)) if config.gpus else 0
        # Without guests, workers with a part of a GPU share one among themselves.
        together = 1 if guests or not 0 < config.gpus < 1 else int(1 / config.gpus + 1e-9)
        for first in range(0, config.workers, together):
            own = range(first, min(first + together, config.workers))
            seats = [_seat(host, config, i, 0, num_gpus) for i in own]
            cpus, memory = len(own) * config.cpus, len(own) * (config.memory_gb or 0.0)
            labels = dict(config.labels)
            for name, guest in guests.items():
                each = guest.workers // config.workers
                seats += [_seat(name, guest, first * each + j, j, num_gpus) for j in range(each)]
                cpus, memory = cpus + each * guest.cpus, memory + each * (guest.memory_gb or 0.0)
                labels |= guest.labels
            _check_shares(seats, num_gpus)
            found.append(Bundle(seats=tuple(seats), cpus=cpus, gpus=num_gpus, memory_gb=memory, labels=labels))
    return tuple(found)


def nodes_of(kinds: Sequence[NodesConfig]) -> tuple[Node, ...]:
    """The nodes that the config lists."""
    return tuple(
        Node(
            name=f"node-{sum(k.count for k in kinds[:number]) + i}",
            cpus=float(kind.cpus),
            gpus=kind.gpus,
            memory_gb=kind.memory_gb,
            gpu_memory_gb=kind.gpu_memory_gb,
            labels=kind.labels,
        )
        for number, kind in enumerate(kinds)
        for i in range(kind.count)
    )


def place(bundles: Sequence[Bundle], nodes: Sequence[Node], *, spread: bool) -> dict[str, str]:
    """The node's name of every bundle, by the bundle's name. ``spread`` fills nodes evenly, else one after the other.

    Raises:
        ValueError: they do not fit, with what is asked for and what there is.
    """
    _check_totals(bundles, nodes)
    _check_kinds(bundles, nodes)
    order = sorted(bundles, key=lambda each: (-each.gpus, -len(each.labels), -each.cpus, -each.memory_gb))
    found = _Search(order, spread=spread).run(list(nodes))
    if found is None:
        raise ValueError(f"no placement of {_asked(bundles)} on {_there(nodes)} was found. Ask for less, or add nodes.")
    return {bundle.name: node for bundle, node in zip(order, found, strict=True)}


class _Search:
    """Depth first; the first descent is greedy, and what has failed from some state on is not tried again."""

    def __init__(self, bundles: Sequence[Bundle], *, spread: bool) -> None:
        self._bundles, self._spread = bundles, spread
        self._failed: set[tuple[int, tuple[tuple[float, int, float, str], ...]]] = set()
        self._steps = 0

    def run(self, free: list[Node], depth: int = 0) -> list[str] | None:
        if depth == len(self._bundles):
            return []
        bundle = self._bundles[depth]
        state = depth, tuple(sorted(_left(node) for node in free))
        self._steps += 1
        if state in self._failed or self._steps > MAX_STEPS:
            return None
        tried: set[tuple[float, int, float, str]] = set()
        for i in sorted(range(len(free)), key=lambda i: (self._preference(free[i]), i)):
            node = free[i]
            if not bundle.fits(node) or _left(node) in tried:
                continue
            tried.add(_left(node))
            rest = self.run([*free[:i], bundle.taken_from(node), *free[i + 1 :]], depth + 1)
            if rest is not None:
                return [node.name, *rest]
        self._failed.add(state)
        return None

    def _preference(self, node: Node) -> tuple[int, float]:
        sign = -1 if self._spread else 1
        return sign * node.gpus, sign * node.cpus


def _left(node: Node) -> tuple[float, int, float, str]:
    """What tells nodes apart for those that still look for a place."""
    return round(node.cpus, 6), node.gpus, round(node.memory_gb or 0.0, 6), str(sorted(node.labels.items()))


def _seat(role: Role, config: RoleConfig, index: int, number: int, num_gpus: int) -> Seat:
    """``number``: among the workers of its role in the bundle; they take its GPUs in turn."""
    if not config.gpus:
        return Seat(role=role, index=index)
    width = max(1, int(config.gpus))
    if width > num_gpus:
        raise ValueError(f"roles.{role} wants {width} GPUs a worker, where it is to lie there are {num_gpus}.")
    slots = tuple((number * width + k) % num_gpus for k in range(width))
    return Seat(role=role, index=index, slots=slots, share=config.gpu_share)


def _check_shares(seats: Iterable[Seat], num_gpus: int) -> None:
    for slot in range(num_gpus):
        here = [seat for seat in seats if slot in seat.slots]
        asked = sum(seat.share for seat in here)
        if asked > 1 + 1e-9:
            parts = ", ".join(f"{seat.name} {seat.share:g}" for seat in here)
            raise ValueError(f"of one GPU {asked:g} is asked for, and there is 1 ({parts}): lower gpus or share.")


def _check_totals(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> None:
    for name, asked, there in (
        ("GPUs", sum(b.gpus for b in bundles), sum(n.gpus for n in nodes)),
        ("CPUs", sum(b.cpus for b in bundles), sum(n.cpus for n in nodes)),
    ):
        if asked > there + 1e-9:
            raise ValueError(
                f"the run asks for {asked:g} {name}, and the cluster has {there:g} ({_there(nodes)}). "
                "Ask for less, or add nodes."
            )


def _check_kinds(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> None:
    """Each kind of bundle by itself: a node holds whole ones only."""
    for kind in {bundle.wants: bundle for bundle in bundles}.values():
        asked = sum(bundle.wants == kind.wants for bundle in bundles)
        there = sum(_room(kind, node, asked) for node in nodes)
        if asked > there:
            raise ValueError(
                f"{asked} times {_describe(kind)} asked for, and the nodes hold {there} of them ({_there(nodes)}). "
                "Ask for less, or add nodes."
            )


def _room(bundle: Bundle, node: Node, most: int) -> int:
    for num in range(most):
        if not bundle.fits(node):
            return num
        node = bundle.taken_from(node)
    return most


def _describe(bundle: Bundle) -> str:
    roles = Counter(seat.role for seat in bundle.seats)
    who = " + ".join(role if num == 1 else f"{num} {role}" for role, num in roles.items())
    memory = f", {bundle.memory_gb:g} GB" if bundle.memory_gb else ""
    labels = "".join(f", {key}={value}" for key, value in bundle.labels.items())
    return f"{who} ({bundle.gpus} GPUs, {bundle.cpus:g} CPUs{memory}{labels})"


def _asked(bundles: Sequence[Bundle]) -> str:
    kinds = Counter(_describe(bundle) for bundle in bundles)
    return ", ".join(f"{num} x {kind}" for kind, num in kinds.items())


def _there(nodes: Sequence[Node]) -> str:
    kinds = Counter(
        f"{node.gpus} GPUs, {node.cpus:g} CPUs"
        + (f", {node.memory_gb:.0f} GB" if node.memory_gb is not None else "")
        + "".join(f", {key}={value}" for key, value in node.labels.items() if not key.startswith("ray.io/"))
        for node in nodes
    )
    return "; ".join(f"{num} nodes with {kind}" for kind, num in kinds.items()) or "no nodes"
