"""How much XLA optimises in tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def little_optimised() -> Iterator[None]:
    """Compiling is what some tests spend their time on, so XLA does little of it. What it has compiled is forgotten at
    the end: other tests of the process would use it, and get numbers that differ in the last bit."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
        jax.clear_caches()
