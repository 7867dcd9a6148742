"""Two network namespaces of this machine, joined by a virtual cable, with a Ray node in each. Needs root.

The script that asks for it is run again inside the first one; the second one holds the receivers.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SUBNET = "10.231.77"
PORT = 6479
START_S = 300.0


def why_not() -> str:
    """Empty if namespaces can be made here."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is missing"
    name = f"vla-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def run(script: Path, arguments: Sequence[str], *, store_gb: float) -> dict[str, Any]:
    """Run ``script`` in the first namespace, with --address and --out added; what it has measured."""
    if reason := why_not():
        print(f"network: skipped, {reason}")
        return {"skipped": reason}
    with (
        tempfile.TemporaryDirectory(prefix="vs") as folder,
        _namespaces() as (a, b),
        _ray_nodes(a, b, folder, store_gb),
    ):
        out = Path(folder) / "out.json"
        command = [sys.executable, str(script), *arguments, "--address", f"{SUBNET}.1:{PORT}", "--out", str(out)]
        subprocess.run(["ip", "netns", "exec", a, *command], check=True)
        return json.loads(out.read_text())


@contextlib.contextmanager
def _namespaces() -> Iterator[tuple[str, str]]:
    a, b = f"vla-a-{os.getpid()}", f"vla-b-{os.getpid()}"
    try:
        for name in (a, b):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", "va", "netns", a, "type", "veth", "peer", "name", "vb", "netns", b)
        for name, device, number in ((a, "va", 1), (b, "vb", 2)):
            _ip("-n", name, "addr", "add", f"{SUBNET}.{number}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
        yield a, b
    finally:
        for name in (a, b):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextlib.contextmanager
def _ray_nodes(a: str, b: str, folder: str, store_gb: float) -> Iterator[None]:
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--num-cpus=4"]
    ray += [f"--object-store-memory={round(store_gb * 1e9)}", f"--temp-dir={folder}/ray"]
    head = [f"--node-ip-address={SUBNET}.1", f"--port={PORT}", "--head", "--include-dashboard=false"]
    other = [f"--node-ip-address={SUBNET}.2", f"--address={SUBNET}.1:{PORT}"]
    nodes = []
    try:
        for name, side, extra in ((a, "a", head), (b, "b", other)):
            command = ["ip", "netns", "exec", name, *ray, *extra, f"--labels=side={side}"]
            with open(f"{folder}/{side}.log", "w") as log:
                nodes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
            _wait_for(f"{folder}/{side}.log", "To terminate", nodes[-1])
        yield
    finally:
        for node in nodes:  # of ours only: `ray stop` would end those of others too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGTERM)
        for node in nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)


def _wait_for(log: str, text: str, node: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while text not in Path(log).read_text():
        if node.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"a Ray node did not start:\n{Path(log).read_text()}")
        time.sleep(0.2)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
