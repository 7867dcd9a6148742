"""Where JAX arrays live, and how often XLA compiles.

Data parallel over the local devices: parameters are on every device, the rows of a micro-batch are split among them.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.monitoring
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vla_rlaif.types import Array, Weights

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class Placement:
    """Local devices in a row, and the two ways an array lies on them."""

    mesh: Mesh

    @classmethod
    def of(cls, num_devices: int | None) -> "Placement":
        """On the first ``num_devices`` local devices; None is all of them.

        Raises:
            ValueError: there are fewer.
        """
        local = jax.local_devices()
        if num_devices is not None and num_devices > len(local):
            raise ValueError(
                f"devices is {num_devices}, but this process has {len(local)} ({local[0].device_kind}); "
                "use fewer, or null for all."
            )
        return cls(Mesh(np.array(local[:num_devices]), ("data",), axis_types=(AxisType.Auto,)))

    @property
    def num_devices(self) -> int:
        return self.mesh.size

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """Of arrays "B ...", whose B rows are split."""
        return NamedSharding(self.mesh, PartitionSpec("data"))

    def micro_rows(self, rows: int, micro_batches: int, name: str) -> int:
        """Rows of a micro-batch of ``name``, whose value is ``rows``.

        Raises:
            ValueError: they do not split evenly.
        """
        if rows % (micro_batches * self.num_devices):
            raise ValueError(
                f"{name} {rows} does not split into {micro_batches} micro-batches on {self.num_devices} devices; "
                f"use a multiple of {micro_batches * self.num_devices}, or fewer devices."
            )
        return rows // micro_batches

    def copies(self, values: Mapping[str, Array]) -> dict[str, jax.Array]:
        """Own copies on every device, safe to donate. Through the host: ``device_put`` to several devices shares the
        buffer of the one that had it, whatever its ``may_alias`` says, and donating it would delete the original."""
        return {name: jax.device_put(np.array(value), self.replicated) for name, value in values.items()}


def to_host(values: Mapping[str, jax.Array]) -> Weights:
    """Copies that survive the donation of ``values``: on the CPU, ``np.asarray`` is a view of the device's buffer."""
    for value in values.values():
        value.copy_to_host_async()
    return {name: np.array(value) for name, value in values.items()}


def lent_to_host(values: Mapping[str, jax.Array]) -> Weights:
    """As ``to_host``, but where they are on the host already, views through DLPack: to be read, and to be let go of,
    before ``values`` are donated."""
    if any(device.platform != "cpu" for value in values.values() for device in value.devices()):
        return to_host(values)
    local: dict[str, Any] = {name: value.addressable_data(0) for name, value in values.items()}
    return {name: np.from_dlpack(value) for name, value in local.items()}


class CompileCounter:
    """XLA compilations of this process since the counter was made, whoever caused them."""

    def __init__(self) -> None:
        self._start = _total().value

    @property
    def count(self) -> int:
        return _total().value - self._start


@dataclass
class _Total:
    value: int = 0

    def listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.value += event == COMPILE_EVENT


@functools.cache
def _total() -> _Total:
    """Listens from the first call on, once a process; it costs one comparison an event."""
    total = _Total()
    jax.monitoring.register_event_duration_secs_listener(total.listen)
    return total
