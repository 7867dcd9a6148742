"""A batch in slices is the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import make_obs

from vla_rlaif.policies.octo.slices import CACHED_BYTES, acting_readout, acting_rows, in_slices, rows_at_once


@pytest.mark.parametrize(("size", "computed"), [(1, 1), (2, 2), (3, 3), (4, 4), (7, 7), (9, 7)])
def test_every_row_is_computed_once_and_in_its_place(size, computed):
    """7 rows: whole slices, slices that must be filled up, and one slice of all."""
    seen = []

    def function(rows):
        seen.append(rows["x"].shape[0])
        return rows["x"] * rows["y"][:, None]

    rows = {"x": jnp.arange(14.0).reshape(7, 2), "y": jnp.arange(7.0)}
    out = jax.jit(lambda rows: in_slices(function, rows, size))(rows)
    np.testing.assert_array_equal(out, np.arange(14).reshape(7, 2) * np.arange(7)[:, None])
    assert set(seen) == {computed}


def test_a_policy_reads_the_same_in_slices(policy):
    network, inputs = policy.network, policy.imitation_inputs(make_obs(5))
    inputs = {name: jnp.asarray(value) for name, value in inputs.items()}
    whole = network.readout(policy.params, inputs)
    sliced = in_slices(lambda rows: network.readout(policy.params, rows), inputs, 2)
    np.testing.assert_allclose(sliced, whole, rtol=1e-5, atol=1e-6)
    assert acting_rows(network, inputs) == 5  # a tiny batch is one slice
    np.testing.assert_array_equal(acting_readout(network, policy.params, inputs), whole)


@pytest.mark.parametrize(
    ("num", "row_bytes", "cores", "expected"),
    [
        (32, CACHED_BYTES // 5, 2, 5),
        (3, CACHED_BYTES // 5, 2, 3),
        (32, 2 * CACHED_BYTES, 4, 4),  # a row a core, even if they do not fit
    ],
)
def test_how_many_rows_at_once(num, row_bytes, cores, expected):
    assert rows_at_once(num, row_bytes, cores) == expected
