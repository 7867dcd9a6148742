"""Parts of the original Octo that its official models do not use: arrays of tests/golden/octo/extra_golden.npz."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

PATH = Path(__file__).parents[1] / "golden" / "octo" / "extra_golden.npz"


@cache
def extra() -> dict[str, np.ndarray]:
    return dict(np.load(PATH))


def array(name: str) -> jax.Array:
    return jnp.asarray(extra()[name])


def variables(part: str) -> dict[str, Any]:
    """Parameters of a part, as flax wants them."""
    prefix = f"{part}/params/"
    flat = {name.removeprefix(prefix): jnp.asarray(v) for name, v in extra().items() if name.startswith(prefix)}
    return {"params": unflatten_dict(flat, sep="/")}


def error(got: Any, name: str) -> float:
    """The largest difference from what upstream gave."""
    got, want = np.asarray(got), extra()[name]
    assert got.shape == want.shape, (name, got.shape, want.shape)
    return float(np.abs(got.astype(np.float64) - want).max())


def assert_close(got: Any, name: str, atol: float = 2e-5) -> None:
    """Prints how much of the tolerance is used (``pytest -s``)."""
    worst = error(got, name)
    print(f"{name}: {worst:.1e} of {atol:.0e}")
    assert worst <= atol, f"{name}: {worst}"


def flattened(tree: Any) -> dict[str, Any]:
    """By '/'-joined name."""
    return {str(name): leaf for name, leaf in flatten_dict(tree, sep="/").items()}


def shapes(init: Any, *args: Any) -> dict[str, tuple[int, ...]]:
    """Of the parameters that ``init`` makes, by name."""
    tree = jax.eval_shape(init, jax.random.key(0), *args)["params"]
    return {name: leaf.shape for name, leaf in flattened(tree).items()}


def golden_shapes(part: str) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in flattened(variables(part)["params"]).items()}


def drawn(init: Any, *args: Any) -> dict[str, Any]:
    """Parameters for a module without golden ones; drawing them with flax would compile every initialiser."""
    rng = np.random.default_rng(0)
    flat = {name: 0.3 * rng.standard_normal(shape) for name, shape in shapes(init, *args).items()}
    return {"params": unflatten_dict({name: jnp.asarray(v, jnp.float32) for name, v in flat.items()}, sep="/")}
