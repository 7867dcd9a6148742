"""Robometer's evaluation server as a reward (https://github.com/robometer/robometer, robometer/evals/eval_server.py).

    GET  /model_info          JSON with "model_path"
    POST /evaluate_batch_npy  multipart: a field sample_<i> with the sample as JSON, in which {"__numpy_file__": NAME}
                              stands for an array, and a file NAME with it as .npy; a field use_frame_steps
    answer                    {"outputs_progress": {"progress_pred": [[of a frame]]},
                               "outputs_success": {"success_probs": [[of a frame]]}}

Robometer sees frames and the instruction. Its samples are progress samples of one clip; all clips of a batch have the
same number of frames, which its collator wants.
Axes: see types.py; K frames shown.
"""

import io
import json
import math
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int, UInt8
from pydantic import BaseModel, ValidationError

from vla_rlaif.preferences.judge_http import Endpoint, Reply
from vla_rlaif.preferences.questions import JudgeFault
from vla_rlaif.reward_terms_config import RobometerRewardConfig
from vla_rlaif.types import EnvSpec, Episodes

Clip = UInt8[np.ndarray, "K height width 3"]


class _Info(BaseModel):
    """Of /model_info, what is used."""

    model_path: str


class RobometerReward:
    """The last frame's progress, or its probability of success, in [0, 1]. NaN for an invalid episode, or one whose
    answer is unusable; more than ``invalid_budget`` of those end the run."""

    privileged: ClassVar[bool] = False

    def __init__(self, config: RobometerRewardConfig) -> None:
        self._config = config
        self._endpoint = Endpoint(
            config.url,
            api_key=None,
            retries=config.retries,
            retry_s=config.retry_s,
            request_s=config.request_s,
            first_s=config.first_s,
            key="reward.url",
            on_failure="The run goes on from its newest checkpoint with --resume.",
        )
        self._model: str | None = None  # that answered first
        self.num_invalid = 0

    @property
    def version(self) -> int:
        return 0

    def probe(self, spec: EnvSpec) -> None:
        """Ask about a made-up episode of this env.

        Raises:
            ValueError: it is another server or model, or does not answer as it should; with what to change.
        """
        self._check_model()
        size = spec.image_size
        made_up = np.random.default_rng(0).integers(0, 256, (self._config.frames, size, size, 3), dtype=np.uint8)
        (answer,) = self._ask([made_up], [spec.instructions[0]], threading.Event())
        if isinstance(answer, str):
            raise ValueError(f"{self._endpoint.url} does not answer as Robometer's evaluation server does: {answer}.")

    def score(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        self._check_model()
        rows, size = np.flatnonzero(episodes.valid), self._config.batch
        scores, give_up = np.full(len(episodes.valid), np.nan, np.float32), threading.Event()
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]

        def ask(batch: Int[np.ndarray, " n"]) -> list[float | str]:
            clips = [self._clip(episodes, row) for row in batch.tolist()]
            return self._ask(clips, [episodes.instruction[row] for row in batch.tolist()], give_up)

        with ThreadPoolExecutor(self._config.concurrency, thread_name_prefix="robometer") as pool:
            try:
                for batch, answers in zip(batches, pool.map(ask, batches), strict=True):
                    scores[batch] = [math.nan if isinstance(answer, str) else answer for answer in answers]
                    self._count([answer for answer in answers if isinstance(answer, str)])
            finally:  # what waits is given up, what is on its way is waited for
                give_up.set()
                pool.shutdown(wait=False, cancel_futures=True)
        return scores

    def _clip(self, episodes: Episodes, row: int) -> Clip:
        """Evenly spaced live frames; a short episode shows some of them twice."""
        camera = self._config.camera or next(iter(episodes.images))
        if camera not in episodes.images:
            raise ValueError(f"reward.camera {camera!r} is none of {sorted(episodes.images)}: name one of them.")
        last = int(episodes.num_decisions[row])
        return episodes.images[camera][row, np.linspace(0, last, self._config.frames).round().astype(int)]

    def _ask(self, clips: Sequence[Clip], tasks: Sequence[str], give_up: threading.Event) -> list[float | str]:
        """A score for each clip, or what was wrong with its answer."""
        body, content_type = multipart(clips, tasks)
        reply = self._endpoint.post_bytes("/evaluate_batch_npy", body, content_type, give_up)
        if reply.status != HTTPStatus.OK:
            raise ValueError(
                f"{self._endpoint.url} refuses {len(clips)} clips of {self._config.frames} frames (status "
                f"{reply.status}): {reply.text}. If that is about their size, lower reward.batch or reward.frames."
            )
        return read_scores(reply.body, self._config.score, num=len(clips), frames=self._config.frames)

    def _check_model(self) -> None:
        """Before every batch of episodes: the answers themselves do not say who gives them."""
        reply = self._endpoint.get("/model_info")
        try:
            found = _Info.model_validate_json(reply.body).model_path
        except ValidationError:
            raise ValueError(_no_robometer(self._endpoint.url, reply)) from None
        if self._config.model is not None and found != self._config.model:
            raise ValueError(f"{self._endpoint.url} serves {found!r}, not reward.model {self._config.model!r}.")
        if self._model is not None and found != self._model:
            raise JudgeFault(f"{self._endpoint.url} serves {found!r} now, not {self._model!r}: it was replaced.")
        self._model = found

    def _count(self, problems: Sequence[str]) -> None:
        self.num_invalid += len(problems)
        if self.num_invalid > self._config.invalid_budget:
            raise JudgeFault(
                f"{self._endpoint.url}: {self.num_invalid} unusable answers, reward.invalid_budget is "
                f"{self._config.invalid_budget}; the last one: {problems[-1]}."
            )


def multipart(clips: Sequence[Clip], tasks: Sequence[str]) -> tuple[bytes, str]:
    """(body, content type) of a request."""
    boundary, parts = uuid.uuid4().hex, []
    for i, (clip, task) in enumerate(zip(clips, tasks, strict=True)):
        file, buffer = f"sample_{i}_trajectory_frames", io.BytesIO()
        np.save(buffer, clip, allow_pickle=False)
        parts.append((f'name="{file}"; filename="{file}.npy"', "application/octet-stream", buffer.getvalue()))
        sample = json.dumps({"sample_type": "progress", "trajectory": _trajectory(clip, task, file)})
        parts.append((f'name="sample_{i}"', "text/plain; charset=utf-8", sample.encode()))
    parts.append(('name="use_frame_steps"', "text/plain; charset=utf-8", b"false"))
    return b"".join(_encoded(boundary, parts)), f"multipart/form-data; boundary={boundary}"


def _trajectory(clip: Clip, task: str, file: str) -> dict[str, Any]:
    return {"frames": {"__numpy_file__": file}, "frames_shape": list(clip.shape), "task": task}


def _encoded(boundary: str, parts: Sequence[tuple[str, str, bytes]]) -> Iterator[bytes]:
    for disposition, kind, content in parts:
        head = f"--{boundary}\r\nContent-Disposition: form-data; {disposition}\r\nContent-Type: {kind}\r\n\r\n"
        yield head.encode() + content + b"\r\n"
    yield f"--{boundary}--\r\n".encode()


def read_scores(body: bytes, head: str, *, num: int, frames: int) -> list[float | str]:
    """Of each of ``num`` samples the last frame's value, or what is wrong with it. Robometer's own client takes a
    missing value for 0; here it is unscorable."""
    group, key = ("outputs_progress", "progress_pred") if head == "progress" else ("outputs_success", "success_probs")
    try:
        found = json.loads(body)
        values = found[group][key]
    except (ValueError, KeyError, TypeError) as error:
        text = body[:200].decode(errors="replace")
        return [f"no {group}.{key} in it ({type(error).__name__}): {text!r}"] * num
    if not isinstance(values, list) or len(values) != num:
        return [f"{key} has {len(values) if isinstance(values, list) else values!r} entries for {num} samples"] * num
    return [_last(value, key, frames) for value in values]


def _last(values: object, key: str, frames: int) -> float | str:
    if not isinstance(values, list) or not 1 <= len(values) <= frames:  # a model may see two frames as one patch
        return f"{key} is {str(values)[:80]} for {frames} frames"
    value = values[-1]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return f"{key} ends with {value!r}, which is no number"
    return min(max(float(value), 0.0), 1.0)  # a regression head may leave the range a little; its own client clamps too


def _no_robometer(url: str, reply: Reply) -> str:
    return (
        f"{url}/model_info answers with status {reply.status} and {reply.text!r}, which names no model: reward.url "
        "must be that of Robometer's evaluation server, without a path."
    )
