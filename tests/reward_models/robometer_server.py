"""A small server that speaks the protocol of Robometer's evaluation server, in a thread. It reads requests with the
standard library's e-mail parser, as whoever gets multipart forms may. None of it is ours."""

import io
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

import numpy as np
from local_http import LocalServer, QuietHandler, Reply

MODEL = "robometer/Robometer-4B"


Sample = dict[str, Any]  # as sent, with the arrays in place
Behaviour = Callable[[list[Sample], int], Reply]  # of the samples and the number of the request, from 0


def progress(sample: Sample) -> list[float]:
    """Of each frame, its mean brightness; the last one is what a client takes."""
    return [float(frame.mean()) / 255 for frame in sample["trajectory"]["frames"]]


def answer(values: list[Any]) -> Reply:
    body = {"outputs_preference": None, "outputs_progress": {"progress_pred": values}, "outputs_success": None}
    return Reply(json.dumps(body).encode())


def honest(samples: list[Sample], number: int) -> Reply:
    values = [progress(sample) for sample in samples]
    success = {"success_probs": [[1 - x for x in one] for one in values]}
    return Reply(json.dumps({**json.loads(answer(values).body), "outputs_success": success}).encode())


@dataclass
class RobometerServer:
    behaviour: Behaviour = honest
    model: str = MODEL
    requests: list[list[Sample]] = field(default_factory=list)

    def __post_init__(self) -> None:
        outer, lock = self, threading.Lock()

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                known = self.path == "/model_info"
                body = {"model_path": outer.model, "num_gpus": 1} if known else {"detail": "Not Found"}
                self.send(Reply(json.dumps(body).encode(), 200 if known else 404))

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
                samples = parsed(head + raw)
                with lock:
                    number = len(outer.requests)
                    outer.requests.append(samples)
                reply = outer.behaviour(samples, number) if self.path == "/evaluate_batch_npy" else Reply(b"", 404)
                time.sleep(reply.delay_s)
                self.send(reply)

        self._server = LocalServer(Handler)

    @property
    def url(self) -> str:
        return self._server.url

    def close(self) -> None:
        self._server.close()


def parsed(message: bytes) -> list[Sample]:
    """The samples of a form, in order, with their arrays."""
    fields: dict[str, str] = {}
    arrays: dict[str, np.ndarray] = {}
    for part in BytesParser(policy=HTTP).parsebytes(message).iter_parts():
        name, content = part.get_param("name", header="content-disposition"), part.get_payload(decode=True)
        assert isinstance(name, str) and isinstance(content, bytes)
        if part.get_filename():
            arrays[name] = np.load(io.BytesIO(content), allow_pickle=False)
        else:
            fields[name] = content.decode()
    assert fields.pop("use_frame_steps") == "false"
    samples = [json.loads(fields[f"sample_{i}"]) for i in range(len(fields))]
    for sample in samples:
        trajectory = sample["trajectory"]
        trajectory["frames"] = arrays[trajectory["frames"]["__numpy_file__"]]
        assert list(trajectory["frames"].shape) == trajectory["frames_shape"]
    return samples
