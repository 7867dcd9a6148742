"""Which free GPUs a replica gets. A replica stays on one node if it fits on one; roles that must survive are spread."""

from collections import Counter
from collections.abc import Iterable, Mapping

from vla_rlaif.pool.state import Gpu, Observed, Replica

Free = dict[str, list[int]]  # node -> slots of healthy GPUs that nobody holds, ascending


def free_gpus(observed: Observed) -> Free:
    held = {gpu for replica in observed.replicas for gpu in replica.gpus}
    return {
        node.name: [i for i, healthy in enumerate(node.healthy) if healthy and Gpu(node.name, i) not in held]
        for node in observed.nodes
    }


def take(free: Free, gpus: Iterable[Gpu]) -> None:
    for gpu in gpus:
        free[gpu.node].remove(gpu.slot)


def per_node(replicas: Iterable[Replica]) -> Counter[str]:
    """GPUs by node."""
    return Counter(gpu.node for replica in replicas for gpu in replica.gpus)


def pack(free: Free, size: int, *, node_size: int, one_node: bool) -> tuple[Gpu, ...] | None:
    """The node that fits best, so that large holes stay; more nodes only for what exceeds a node. None: no room."""
    fitting = [(len(slots), node) for node, slots in free.items() if len(slots) >= size]
    if fitting:
        node = min(fitting)[1]
        return tuple(Gpu(node, i) for i in free[node][:size])
    if one_node or (size <= node_size) or sum(map(len, free.values())) < size:
        return None
    return _gather(free, size)


def scatter(free: Free, size: int) -> tuple[Gpu, ...] | None:
    """Any GPUs, on as few nodes as possible: for jobs that do not ask for one node."""
    if sum(map(len, free.values())) < size:
        return None
    whole = pack(free, size, node_size=size, one_node=True)
    return whole if whole is not None else _gather(free, size)


def spread(free: Free, size: int, *, held: Mapping[str, int], cap: int) -> tuple[Gpu, ...] | None:
    """The node that holds the fewest GPUs of the role, and no more than ``cap`` with the new ones."""
    fitting = [
        (held.get(node, 0), -len(slots), node)
        for node, slots in free.items()
        if len(slots) >= size and held.get(node, 0) + size <= cap
    ]
    if not fitting:
        return None
    node = min(fitting)[2]
    return tuple(Gpu(node, i) for i in free[node][:size])


def _gather(free: Free, size: int) -> tuple[Gpu, ...]:
    """The fullest nodes first."""
    gpus: list[Gpu] = []
    for node, slots in sorted(free.items(), key=lambda item: (-len(item[1]), item[0])):
        gpus += [Gpu(node, i) for i in slots[: size - len(gpus)]]
    return tuple(gpus)
