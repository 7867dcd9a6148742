"""The verb in a process of its own: serves a policy folder, follows it, leaves on SIGTERM; mistakes are told."""

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import numpy as np
import pytest
import yaml
from serving import SPEC, Client, in_process, make_gaussian, observation, pack, settings, unpack, weights_of
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from vla_rlaif.checkpoint import save_policy
from vla_rlaif.config import parse_config
from vla_rlaif.serve.verbs import read_tokens, serve_policy

CONFIG = {
    "env": {"type": "point_reach"},
    "policy": {"type": "gaussian", "backend": "torch"},
    "reward": {"type": "success"},
}
CONFIG |= {"algorithm": {"clip_low": 0.2, "clip_high": 0.2}}
TOKEN = "new-token-0123456789"
SCRIPT = """
import sys
from pathlib import Path
from vla_rlaif.cli import say
from vla_rlaif.config import load_config
from vla_rlaif.serve.settings import ServeSettings
from vla_rlaif.serve.verbs import serve_policy
config, folder, tokens = map(Path, sys.argv[1:])
serve_policy(load_config(config), folder, ServeSettings(port=0), token_file=tokens, follow=True, say=say)
"""


async def test_a_server_process_from_start_to_end(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "tokens").write_text(f"old-token-0123456789\n{TOKEN}\n")
    best = tmp_path / "best"
    save_policy(best, make_gaussian().metadata(), weights_of(0))
    files = (tmp_path / "run.yaml", best, tmp_path / "tokens")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SCRIPT, *files, stdout=PIPE)
    assert process.stdout is not None
    try:
        address = re.match(r"listening on (ws://127\.0\.0\.1:\d+), warming up", await line(process.stdout))
        assert address is not None
        headers = {"Authorization": f"Api-Key {TOKEN}"}
        async with connect(address[1], additional_headers=headers, compression=None) as socket:
            metadata = await socket.recv()
            assert isinstance(metadata, bytes)
            client, sent = Client(socket, unpack(metadata)), observation(0)
            assert (await line(process.stdout)).startswith("ready: ")
            np.testing.assert_array_equal((await client.actions(sent))["actions"], in_process(make_gaussian(), sent, 0))
            save_policy(best, make_gaussian().metadata(), weights_of(1))
            assert await line(process.stdout) == f"{best} was replaced: version 1 acts"
            reply = await client.actions(sent)
            assert reply["version"] == 1
            np.testing.assert_array_equal(reply["actions"], in_process(make_gaussian(1), sent, 0))
            process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosedError, match="drains"):
                await socket.recv()
        assert [await line(process.stdout) for _ in range(2)] == ["draining", "drained"]
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


HANGS = """
import threading
from serving import SlowPolicy

def make(spec, seed):
    policy = SlowPolicy(rule=lambda state: policy.gate.clear() if state.any() else state.sum(axis=1))
    policy.gate.set()
    return policy
"""


async def test_a_policy_that_hangs_does_not_hold_the_process(tmp_path):
    """The first call that sees a state closes the gate, and the next one waits behind it for 30 s."""
    (tmp_path / "hangs.py").write_text(HANGS)
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({**CONFIG, "policy": {"type": "custom", "factory": "hangs:make"}})
    )
    save_policy(tmp_path / "best", make_gaussian().metadata(), weights_of(0))
    script = SCRIPT.replace("port=0", "port=0, drain_s=0.5").replace(
        "import sys", "import sys; sys.path.append('.')", 1
    )
    (tmp_path / "tokens").write_text(TOKEN)
    files = (tmp_path / "run.yaml", tmp_path / "best", tmp_path / "tokens")
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = (sys.executable, "-c", script, *files)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, cwd=tmp_path, env=paths)
    assert process.stdout is not None
    try:
        address = re.match(r"listening on (ws://127\.0\.0\.1:\d+), warming up", await line(process.stdout))
        assert address is not None
        async with connect(address[1], additional_headers={"Authorization": f"Api-Key {TOKEN}"}) as socket:
            await socket.recv()
            await socket.send(pack(observation(0)))
            assert isinstance(await socket.recv(), str)
            await socket.send(pack(observation(0)))
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            began = asyncio.get_running_loop().time()
            assert await asyncio.wait_for(process.wait(), 20) == 0
            assert asyncio.get_running_loop().time() - began < 5
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def line(stream: asyncio.StreamReader) -> str:
    return (await asyncio.wait_for(stream.readline(), 50)).decode().rstrip()


def serve(folder: Path, **changes) -> None:
    config = parse_config(CONFIG, source="test")
    serve_policy(config, folder, settings(**changes), token_file=None, follow=False, say=print)


def test_mistakes(tmp_path):
    with pytest.raises(ValueError, match=r"no policy checkpoint at .*best"):
        serve(tmp_path / "best")
    save_policy(tmp_path / "mute", {"config": {"type": "gaussian"}}, weights_of(0))
    with pytest.raises(ValueError, match=r"policy\.json has no spec"):
        serve(tmp_path / "mute")
    metadata = make_gaussian().metadata()
    save_policy(tmp_path / "octo", {**metadata, "config": {"type": "octo"}}, weights_of(0))
    with pytest.raises(ValueError, match="holds a policy of type 'octo', the config wants 'gaussian'"):
        serve(tmp_path / "octo")
    save_policy(tmp_path / "best", metadata, weights_of(0))
    with pytest.raises(ValueError, match="cameras names 'left'; the policy has primary, wrist"):
        serve(tmp_path / "best", cameras={"left": "x"})


def test_token_files(tmp_path):
    (tmp_path / "tokens").write_text("one\n\ntwo\n")
    assert read_tokens(tmp_path / "tokens") == ("one", "two")
    (tmp_path / "tokens").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        read_tokens(tmp_path / "tokens")
    with pytest.raises(ValueError, match="openssl rand"):
        read_tokens(tmp_path / "missing")


def test_spec_is_stored_with_the_policy(tmp_path):
    from vla_rlaif.serve.verbs import spec_of

    save_policy(tmp_path / "best", make_gaussian().metadata(), weights_of(0))
    assert spec_of(tmp_path / "best") == SPEC
