"""A small OpenAI-compatible server in a thread: what other people's servers do, well and badly. None of it is ours."""

import base64
import io
import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from local_http import LocalServer, QuietHandler, Reply
from PIL import Image

MODEL = "small-vlm"


Behaviour = Callable[[dict[str, Any], int], Reply]  # of a request and its number, from 0


def completion(probabilities: dict[str, float], *, model: str = MODEL, finish: str = "length", said: str = "") -> Reply:
    """As vLLM writes it, with what is not used left out."""
    said = said or max(probabilities, key=lambda token: probabilities[token])
    top = [{"token": t, "logprob": math.log(p) if p else -9999.0, "bytes": []} for t, p in probabilities.items()]
    logprobs = {"content": [{"token": said, "logprob": -0.1, "bytes": [], "top_logprobs": top}]}
    choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": finish}
    body = {"id": "x", "object": "chat.completion", "model": model, "choices": [choice | {"logprobs": logprobs}]}
    return Reply(json.dumps(body).encode())


def constrained(probability: Callable[[list[str], list[list[np.ndarray]]], list[float]]) -> Behaviour:
    """Honours ``structured_outputs``: ``probability`` gives those of the labels, from the images before each text."""

    def answer(body: dict[str, Any], number: int) -> Reply:
        labels = body["structured_outputs"]["choice"]
        if len(labels) == 1:
            return completion({labels[0]: 1.0})
        return completion(dict(zip(labels, probability(labels, clips(body)), strict=True)))

    return answer


def clips(body: dict[str, Any]) -> list[list[np.ndarray]]:
    """The images of a request; texts part them."""
    found: list[list[np.ndarray]] = [[]]
    for part in body["messages"][0]["content"]:
        if part["type"] == "text":
            found.append([])
        else:
            data = part["image_url"]["url"].removeprefix("data:image/png;base64,")
            found[-1].append(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))))
    return [images for images in found if images]


def brightness(labels: list[str], shown: list[list[np.ndarray]]) -> list[float]:
    """Prefers the clip that ends brighter, by sigmoid(difference / 20); a tenth of the probability is for C."""
    first, second = (float(images[-1].mean()) for images in shown)
    p = 1 / (1 + math.exp(-(first - second) / 20))
    return [0.9 * p, 0.9 * (1 - p), 0.1] if len(labels) == 3 else [p, 1 - p]


HONEST = constrained(brightness)


class JudgeServer:
    """Answers by its ``behaviour``, which tests may change at any time."""

    def __init__(self, behaviour: Behaviour = HONEST) -> None:
        self.behaviour = behaviour
        self.served = [MODEL]
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._now, self._lock = 0, threading.Lock()
        outer = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                models = {"object": "list", "data": [{"id": name, "object": "model"} for name in outer.served]}
                self.send(Reply(json.dumps(models).encode()))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append(dict(self.headers))
                    outer._now += 1
                    outer.most_at_once = max(outer.most_at_once, outer._now)
                try:
                    reply = outer.behaviour(body, number)
                    time.sleep(reply.delay_s)
                finally:
                    with outer._lock:  # before the answer leaves: the client may ask again at once
                        outer._now -= 1
                self.send(reply)

        self._server = LocalServer(Handler)

    @property
    def url(self) -> str:
        return f"{self._server.url}/v1"

    def close(self) -> None:
        self._server.close()
