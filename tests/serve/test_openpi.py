"""The real openpi client, from an environment of its own (it needs NumPy 1), gets the actions that we get in process.

Opt in with OPENPI_PYTHON=path/to/python of an environment with openpi-client; `make env-openpi` makes one.
"""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
from serving import SPEC, in_process, make_gaussian, metric, observation, quiet, settings

from vla_rlaif.serve.server import PolicyServer

PYTHON = os.environ.get("OPENPI_PYTHON")
TOKEN = "0123456789abcdef0123"


@pytest.mark.skipif(PYTHON is None, reason="set OPENPI_PYTHON to a python with openpi-client; `make env-openpi` does")
async def test_the_real_client_gets_the_actions_of_the_policy(tmp_path):
    assert PYTHON is not None
    sent = [observation(seed) for seed in range(5)]
    columns = [np.stack([o[f"observation/{name}"] for o in sent]) for name in ("image", "wrist_image", "state")]
    np.savez(tmp_path / "sent.npz", image=columns[0], wrist=columns[1], state=columns[2])
    script = Path(__file__).with_name("openpi_robot.py")
    async with PolicyServer(make_gaussian, SPEC, settings(deadline_ms=10_000.0), tokens=(TOKEN,), say=quiet) as server:
        arguments = (script, str(server.port), TOKEN, tmp_path / "sent.npz", tmp_path / "got.npz")
        client = await asyncio.create_subprocess_exec(PYTHON, *arguments)
        assert await asyncio.wait_for(client.wait(), 50) == 0
        assert metric(server, "requests_total", outcome="ok") == 11
        assert metric(server, "requests_total", outcome="invalid") == 1
    got = np.load(tmp_path / "got.npz")
    expected = np.stack([in_process(make_gaussian(), o, 0) for o in sent])
    np.testing.assert_array_equal(got["chunks"], expected, strict=True)
    np.testing.assert_array_equal(got["steps"], expected, strict=True)
    np.testing.assert_array_equal(got["after"], expected[-1], strict=True)
    assert got["versions"].tolist() == [0] * 5
    assert "invalid: the state has 2 values (observation/state 2), wanted 4." in str(got["error"])
