"""Runs vLLM's OpenAI server in vLLM's own environment: serve.py FOLDER ARGUMENTS. It ends with its starter.

The starter holds the other end of stdin and writes nothing; when it dies, however that happens, reading ends, FOLDER
(its exchange folder, with the socket) is removed and the whole process group is killed: the server, its engine and its
workers.
"""

import os
import runpy
import shutil
import signal
import sys
import threading
from pathlib import Path


def end_with_the_starter(folder: Path) -> None:
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with_the_starter, args=(Path(sys.argv.pop(1)),), daemon=True).start()
    sys.argv[0] = "vllm"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
