"""A vLLM server that this process starts, owns and ends. Knows processes and HTTP, nothing of policies.

It listens on a Unix socket in a folder of its own, so there is no port that others could take or reach.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
import weakref
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from vla_rlaif.token_config import VLLMConfig

SIDE = Path(__file__).parent / "vllm_side"  # what runs in vLLM's environment: nothing else of ours is importable there
_POLL_S = 0.2
_END_S = 10.0  # from a polite end to a forced one


class ServerFault(RuntimeError):
    """The server is down, too slow, or answers what it should not."""


class VLLMServer:
    """Started by the constructor, which returns at once; ``wait`` for it."""

    def __init__(
        self, model: Path, config: VLLMConfig, *, log: Path, max_tokens: int, num_images: int, template: str
    ) -> None:
        """``max_tokens``: of a prompt and what is written behind it. ``template``: the Jinja template of prompts.

        Raises:
            ValueError: there is no such interpreter.
        """
        if not config.python.is_file():
            raise ValueError(f"engine.python: there is no {config.python}. `make env-vllm` builds .venv-vllm.")
        self.name = f"token_vla-{uuid.uuid4().hex[:12]}"  # asked for in every request: no other server answers to it
        self.log, self._config = log, config
        self._folder = Path(tempfile.mkdtemp(prefix="vla_rlaif-vllm-"))
        log.parent.mkdir(parents=True, exist_ok=True)
        (self._folder / "template.jinja").write_text(template)
        arguments = {
            "model": str(model.resolve()),
            "served-model-name": self.name,
            "uds": str(self._socket),
            "dtype": config.dtype,
            "max-model-len": str(max_tokens),
            "max-num-seqs": str(config.max_rows),
            "kv-cache-memory-bytes": str(round(config.memory_gb * 2**30)),
            "limit-mm-per-prompt": json.dumps({"image": num_images}),
            "chat-template": str(self._folder / "template.jinja"),
            "chat-template-content-format": "openai",
            "generation-config": "vllm",  # not the folder's, which may penalise repetitions
            "logprobs-mode": "processed_logprobs",  # with temperature and allowed ids, as the policy scores
            "weight-transfer-config": json.dumps({"backend": "file"}),
            "worker-extension-cls": "file_transfer.Extension",
            "seed": "0",
        }
        flags = ["--enforce-eager"] if config.device == "cpu" else []
        flags += ["--enable-sleep-mode"] if config.sleep else []
        command = [str(config.python.absolute()), str(SIDE / "serve.py"), str(self._folder), *flags]
        command += [text for name, value in arguments.items() for text in (f"--{name}", value)]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=_environment(config),
                cwd=self._folder,
                start_new_session=True,
            )
        self.close = weakref.finalize(self, _end, self._process, self._folder)

    @property
    def _socket(self) -> Path:
        return self._folder / "socket"

    @property
    def pid(self) -> int:
        """Of the server, and of its process group."""
        return self._process.pid

    @property
    def exchange(self) -> Path:
        """A folder that both sides read and write."""
        return self._folder

    def wait(self) -> None:
        """Until the server answers, and to our name.

        Raises:
            ServerFault: it ended, or did not come up in ``start_s``.
        """
        deadline = time.monotonic() + self._config.start_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerFault(
                    f"the vLLM server ended while starting (exit {self._process.returncode}).{self._tail()}"
                )
            try:
                if _request(self._socket, "GET", "/health", b"", timeout_s=5.0)[0] == HTTPStatus.OK:
                    break
            except (OSError, HTTPException):
                pass
            time.sleep(_POLL_S)
        else:
            raise ServerFault(f"the vLLM server did not come up in start_s ({self._config.start_s:g} s).{self._tail()}")
        served = [model["id"] for model in self.get("/v1/models")["data"]]
        if served != [self.name]:
            raise ServerFault(f"the server at {self._socket} serves {served}, not {self.name}.")

    def get(self, path: str) -> dict[str, Any]:
        return self._json("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._json("POST", path, body)

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """The answer; whatever goes wrong is a ServerFault that names the log."""
        if self._process.poll() is not None:
            raise ServerFault(f"the vLLM server has ended (exit {self._process.returncode}).{self._tail()}")
        sent = b"" if body is None else json.dumps(body).encode()
        try:
            status, answer = _request(self._socket, method, path, sent, timeout_s=self._config.request_s)
        except TimeoutError:
            late = f"{method} {path} took longer than request_s ({self._config.request_s:g} s)"
            raise ServerFault(f"the vLLM server is too slow: {late}.{self._tail()}") from None
        except (OSError, HTTPException) as error:
            raise ServerFault(f"the vLLM server does not answer {method} {path}: {error!r}.{self._tail()}") from None
        if status != HTTPStatus.OK:
            text = answer[:2000].decode(errors="replace")
            raise ServerFault(f"the vLLM server refused {method} {path} ({status}): {text}")
        return json.loads(answer) if answer else {}

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return f" The end of {self.log}:\n" + "\n".join(lines)


def _environment(config: VLLMConfig) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
    # Compiling a sampler for the CPU takes half a minute at the first request.
    quick = {"TORCH_COMPILE_DISABLE": "1"} if config.device == "cpu" else {}
    return (
        ours
        | quick
        | {
            "PYTHONPATH": str(SIDE),
            "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, take weights and reset caches
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
    )


def _request(path: Path, method: str, target: str, body: bytes, *, timeout_s: float) -> tuple[int, bytes]:
    """Status and content. A connection each: the server closes one after an error of its own."""
    with socket.socket(socket.AF_UNIX) as unix:
        unix.settimeout(timeout_s)
        unix.connect(str(path))
        connection = HTTPConnection("vllm")
        connection.sock = unix
        connection.request(method, target, body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            return response.status, response.read()


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """The whole process group: the server's own children outlive it otherwise."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)  # the server itself may just have done so
