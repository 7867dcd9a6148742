"""A token policy that generates through a vLLM server. The learner keeps training the policy it wraps, in process.

Axes: see types.py; S = H * A tokens.
"""

import base64
import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8, UInt32
from PIL import Image
from safetensors.torch import save_file

from vla_rlaif.interfaces import Learner
from vla_rlaif.policies.tokens.families import PaliGemma
from vla_rlaif.policies.tokens.folder import save_model
from vla_rlaif.policies.tokens.policy import TokenPolicy
from vla_rlaif.policies.tokens.tuning import merged_tensors
from vla_rlaif.policies.tokens.vllm_server import ServerFault, VLLMServer
from vla_rlaif.token_config import VLLMConfig
from vla_rlaif.types import Batch, Decision, Observation, Weights

_TRIES = 2  # of a weight update; each sends everything
_TEMPLATE = (
    "{% for part in messages[0]['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}MARK"
    "{% endif %}{% endfor %}"
)


class VLLMPolicy:
    """Acts with the weights that were sent last; a failed update leaves it unable to act until one succeeds."""

    window = 1

    def __init__(self, local: TokenPolicy, config: VLLMConfig, folder: Path):
        """Starts the server, which comes up in the background. ``folder`` is for its log.

        Raises:
            ValueError: vLLM cannot generate for this policy.
        """
        if isinstance(local.prompter.family, PaliGemma):
            raise ValueError(
                "vLLM writes PaliGemma's prompts in its own way, not policy.prompt's: use engine in_process."
            )
        self.local, self._config = local, config
        self._version: int | None = None
        self._bin_of = {int(i): b for b, i in enumerate(local.allowed)}
        mark = local.prompter.family.image_mark
        self._model = folder / "model"
        save_model(local, self._model)
        self.server = VLLMServer(
            self._model,
            config,
            log=folder / "server.log",
            max_tokens=local.prompter.max_tokens + local.num_tokens,
            num_images=len(local.spec.cameras),
            template=_TEMPLATE.replace("MARK", mark),
        )
        self._is_up = False
        self._is_asleep = False
        self._threads = ThreadPoolExecutor(config.max_rows, thread_name_prefix="vllm")

    @property
    def version(self) -> int:
        """Of the weights in the server."""
        if self._version is None:
            raise ServerFault("the vLLM server has no whole set of weights: none was sent, or sending failed.")
        return self._version

    def act(self, obs: Observation, seeds: UInt32[np.ndarray, " N"], *, noise_scale: float = 1.0) -> Decision:
        """As TokenPolicy.act, but with vLLM's random numbers.

        Raises:
            ServerFault: the server has other weights than were sent last, or does not answer as it should.
        """
        if noise_scale not in (0.0, 1.0):
            raise ValueError(f"noise_scale {noise_scale}: with policy.engine vllm it is 0 or 1.")
        self._require_version(self.version)
        ids, mask = (self.local.prompter.encode(obs)[name] for name in ("ids", "mask"))
        wanted = [row[used == 1].tolist() for row, used in zip(ids, mask, strict=True)]
        bodies = [self._request(*row, noise_scale) for row in self._rows(obs, seeds)]
        answers = list(self._threads.map(self._written, bodies, wanted))
        bins, logp = (np.stack(column) for column in zip(*answers, strict=True))
        if noise_scale == 0 and self.local.config.temperature != 1:
            logp = np.full_like(logp, np.nan)  # a greedy vLLM knows no temperature, so its log-probs are others
        return self.local.decision(bins, logp.astype(np.float32))

    def load(self, weights: Weights, version: int) -> None:
        """Send all weights: pause, update, finish, forget what was cached under the old ones, resume.

        Raises:
            ServerFault: it failed twice. Nothing acts then until another ``load`` has succeeded.
        """
        self.local.load(weights, version)
        self._version = None
        if not self._is_up:
            self.server.wait()
            self.server.post("/init_weight_transfer_engine", {"init_info": {}})
            self._is_up = True
        if self._is_asleep:
            self.server.post("/wake_up")
            self._is_asleep = False
        path = self.server.exchange / "weights.safetensors"
        tensors = {name: value.cpu().contiguous() for name, value in merged_tensors(self.local.module).items()}
        save_file(tensors, path, {"version": str(version)})
        try:
            for attempt in range(_TRIES):
                try:
                    self.send(path, version)
                    break
                except ServerFault:
                    if attempt + 1 == _TRIES:
                        raise
        finally:
            path.unlink()
        self._require_version(version)
        self._version = version

    def sleep(self) -> None:
        """Give the GPU's memory back until the next ``load``."""
        self.server.post("/sleep?level=2")
        self._is_asleep, self._version = True, None

    def close(self) -> None:
        self._threads.shutdown()
        self.server.close()

    def send(self, path: Path, version: int) -> None:
        """Let the server take a file of weights. If it fails, the server stays paused: what it holds may be neither the
        old weights nor the new ones."""
        self._version = None
        post = self.server.post
        post("/pause?mode=wait")
        post("/start_weight_update")
        post("/update_weights", {"update_info": {"path": str(path), "version": str(version)}})
        post("/finish_weight_update", {"weight_version": str(version)})
        # Both would answer for the old weights: keys and values of prompts, and embeddings of images.
        if not post("/reset_prefix_cache")["success"]:
            raise ServerFault("the vLLM server could not reset its prefix cache: requests are running.")
        post("/reset_encoder_cache")
        post("/resume")

    def _require_version(self, version: int) -> None:
        have = self.server.get("/weight_info")["weight_version"]
        if have != str(version):
            raise ServerFault(f"the vLLM server has weights of version {have}, wanted {version}. Send them again.")

    def _rows(
        self, obs: Observation, seeds: UInt32[np.ndarray, " N"]
    ) -> list[tuple[tuple[str, str], list[UInt8[np.ndarray, "3 height width"]], int]]:
        frames = self.local.prompter.frames(obs.images).numpy()
        texts = self.local.prompter.texts_around(obs)
        return [(text, list(images), int(seed)) for text, images, seed in zip(texts, frames, seeds, strict=True)]

    def _request(
        self, text: tuple[str, str], images: list[UInt8[np.ndarray, "3 height width"]], seed: int, noise_scale: float
    ) -> dict[str, Any]:
        before, after = ({"type": "text", "text": part} for part in text)
        shown = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in images]
        content = [before, *shown, after] if text[0] else [*shown, after]
        return {
            "model": self.server.name,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.local.num_tokens,
            "ignore_eos": True,
            "temperature": self.local.config.temperature * noise_scale,
            "seed": seed,
            "allowed_token_ids": self.local.allowed.tolist(),
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            "add_generation_prompt": False,
        }

    def _written(self, body: Mapping[str, Any], prompt: list[int]) -> tuple[np.ndarray, Float[np.ndarray, " S"]]:
        answer = self.server.post("/v1/chat/completions", body)
        choice = answer["choices"][0]
        if answer["prompt_token_ids"] != prompt:
            raise ServerFault(
                f"vLLM reads a prompt as {answer['prompt_token_ids']}, transformers here as {prompt}: the two would be "
                "different policies. Are the folder's processor files those of the model?"
            )
        ids = choice["token_ids"]
        if len(ids) != self.local.num_tokens or any(i not in self._bin_of for i in ids):
            raise ServerFault(f"vLLM wrote the tokens {ids}; wanted {self.local.num_tokens} of the action tokens.")
        logp = [token["logprob"] for token in choice["logprobs"]["content"]]
        return np.array([self._bin_of[i] for i in ids]), np.array(logp)


class AsleepWhileLearning:
    """A learner that has the GPU to itself while it updates: the engine sleeps until the next ``load``."""

    def __init__(self, learner: Learner, engine: VLLMPolicy):
        self._learner, self._engine = learner, engine

    @property
    def version(self) -> int:
        return self._learner.version

    def update(self, batch: Batch, seed: int) -> Mapping[str, float]:
        self._engine.sleep()
        return self._learner.update(batch, seed)

    def weights(self, *, averaged: bool = False) -> Weights:
        return self._learner.weights(averaged=averaged)

    def trained(self, *, averaged: bool) -> Weights:
        return self._learner.trained(averaged=averaged)

    def state(self) -> Weights:
        return self._learner.state()

    def restore(self, state: Weights) -> None:
        self._learner.restore(state)


def _data_url(image: UInt8[np.ndarray, "3 height width"]) -> str:
    """Lossless, and hardly compressed: it goes no further than this machine."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
