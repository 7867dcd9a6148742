"""Placement of JAX arrays, copies that leave the device, and the count of compilations."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vla_rlaif.devices import CompileCounter, Placement, to_host


def test_four_devices_train_as_one_does():
    """The CPU shows as four devices only if XLA is told before it starts, so those tests have their own process."""
    file = Path(__file__).with_name("on_four_devices.py")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **flags},
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


@pytest.mark.parametrize("source", [np.arange(64.0, dtype=np.float32), jnp.arange(64.0)], ids=["numpy", "jax"])
def test_copies_may_be_donated_and_host_copies_stay(source):
    copy = Placement.of(1).copies({"a": source})["a"]
    before = to_host({"a": copy})["a"]
    after = jax.jit(lambda a: a + 1, donate_argnums=0)(copy)
    assert copy.is_deleted()
    np.testing.assert_array_equal(source, np.arange(64.0))
    np.testing.assert_array_equal(before, np.arange(64.0))
    np.testing.assert_array_equal(after, np.arange(64.0) + 1)


def test_compilations_are_counted_from_where_the_counter_starts():
    double = jax.jit(lambda x: 2 * x)
    inputs = [np.ones(3), np.ones(3), np.ones(4)]
    first = CompileCounter()
    double(inputs[0])
    assert first.count == 1
    double(inputs[1])
    assert first.count == 1
    second = CompileCounter()
    double(inputs[2])  # another shape
    assert (first.count, second.count) == (2, 1)
