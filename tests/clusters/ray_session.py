"""Ray for tests: one node that pretends to have 8 CPUs, 4 GPUs and labels."""

import os
import sys
from collections.abc import Mapping

NUM_CPUS, NUM_GPUS = 8, 4
LABELS = {"kind": "simulated", "zone": "a"}
START_S = 180.0  # for actors, on a busy machine
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_prestart_worker_first_driver": "0",  # else as many processes as there are CPUs start for nothing
}
_before: dict[str, str | None] = {}


def is_running() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def start() -> None:
    """Unless it runs already."""
    import ray

    if ray.is_initialized():
        return
    _before.update({name: os.environ.get(name) for name in _ENVIRONMENT})
    os.environ.update(_ENVIRONMENT)
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        num_gpus=NUM_GPUS,
        labels=LABELS,
        include_dashboard=False,
        object_store_memory=150 * 2**20,
        log_to_driver=False,
    )


def stop() -> None:
    import ray

    ray.shutdown()
    _restore(_before)


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
