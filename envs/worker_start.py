"""The main script of an env worker, run by its path: `python worker_start.py SOCKET ARRAYS LIFELINE` (descriptors).

Under the driver's own interpreter it takes over the driver's import path. Under another one it makes of the package
only what a worker needs, since that interpreter has other versions of our dependencies, or none.
"""

import fcntl
import json
import os
import select
import signal
import sys
import types
from multiprocessing.connection import Connection


def _die_with_the_driver(lifeline: int) -> None:
    """The driver holds the other end and writes nothing, so the only event is its end. The kernel then sends SIGIO,
    which ends the process even inside a call that never returns."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it was gone before
        os._exit(1)


def _package_of_workers() -> None:
    """``vla_rlaif.envs`` as a namespace of this folder. With the real package's folder on the import path, our other
    packages would hide this interpreter's own."""
    folder = os.path.dirname(os.path.abspath(__file__))
    for name in ("vla_rlaif", "vla_rlaif.envs"):
        module = types.ModuleType(name)
        module.__path__ = [folder] if name == "vla_rlaif.envs" else []
        sys.modules[name] = module


if __name__ == "__main__":
    socket_fd, arrays_fd, lifeline_fd = (int(a) for a in sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    os.dup2(2, 1)  # suites print; the driver's output is not theirs
    _die_with_the_driver(lifeline_fd)
    connection = Connection(socket_fd)
    hello = json.loads(connection.recv_bytes())
    if hello["sys_path"] is None:
        _package_of_workers()
        sys.path[:] = [*hello["extra_path"], *sys.path[1:]]
    else:
        sys.path[:] = hello["sys_path"]
    from vla_rlaif.envs.worker import main

    main(connection, arrays_fd, hello)
