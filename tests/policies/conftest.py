"""The tiny Octo that the tests of policies share."""

from collections.abc import Iterator

import numpy as np
import pytest
from compilation import little_optimised
from tiny import make_config, make_spec

from vla_rlaif.policies.octo.construct import from_scratch
from vla_rlaif.policies.octo.policy import OctoPolicy


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Of every module: without an ``__init__.py`` the scope "package" lasts until pytest ends, for all other tests."""
    with little_optimised():
        yield


@pytest.fixture(scope="session")
def policy() -> OctoPolicy:
    """Shared by tests that leave its parameters alone. The head is not equal to the frozen one."""
    policy = from_scratch(make_config(), make_spec(), seed=1)
    rng = np.random.default_rng(0)
    head = {name: np.asarray(policy.params[name]) for name in sorted(policy.trainable)}  # a set has no order
    policy.load({name: v + 0.1 * rng.normal(size=v.shape).astype(np.float32) for name, v in head.items()}, 7)
    return policy
