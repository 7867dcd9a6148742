"""A vision-language model that writes action chunks as tokens. Knows the env's spec, nothing of rewards or optimisers.

``construct.py`` makes them. Axes: see types.py; S = H * A tokens, D = 256 bins, L prompt tokens, W width.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt32
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from vla_rlaif.policies.specs import spec_to_json
from vla_rlaif.policies.tokens.bins import Bins
from vla_rlaif.policies.tokens.prompts import Prompter
from vla_rlaif.policies.tokens.sampling import Chooser, gumbel_noise, log_probs
from vla_rlaif.policies.tokens.tuning import trainable_names
from vla_rlaif.token_config import TokenVLAConfig
from vla_rlaif.torch_weights import from_array, load_strictly, named_tensors
from vla_rlaif.tune_config import HeadTuning, LoraTuning
from vla_rlaif.types import Decision, EnvSpec, Observation, Weights

Inputs = Mapping[str, Tensor]


class TokenPolicy:
    """Acts, and scores its own tokens again under the current parameters of ``module``."""

    window = 1

    def __init__(
        self,
        module: Any,
        prompter: Prompter,
        *,
        config: TokenVLAConfig,
        spec: EnvSpec,
        allowed: Int[np.ndarray, " D"],
    ):
        """``allowed``: the vocabulary id of each bin. The module is a transformers model, adapters included."""
        self.module, self.prompter, self.config, self.spec = module, prompter, config, spec
        self._version = 0
        self._allowed = torch.tensor(allowed)
        self.trainable = trainable_names(module, config.tune)
        # A folder's own settings (a repetition penalty, say) would change the distribution that is sampled from.
        module.generation_config = GenerationConfig(pad_token_id=prompter.pad_id)
        self._generation = GenerationConfig(
            max_new_tokens=self.num_tokens, do_sample=False, pad_token_id=prompter.pad_id
        )
        module.requires_grad_(False)

    @property
    def version(self) -> int:
        return self._version

    @property
    def params(self) -> dict[str, Tensor]:
        """As they are stored: what is kept in bfloat16 is widened."""
        tensors = {name: value.detach() for name, value in named_tensors(self.module).items()}
        return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}

    @property
    def bins(self) -> Bins:
        return self.prompter.bins

    @property
    def allowed(self) -> Int[np.ndarray, " D"]:
        """The vocabulary id of each bin."""
        return self._allowed.numpy()

    @property
    def num_tokens(self) -> int:
        return self.spec.chunk * self.spec.action_dim

    @property
    def imitable(self) -> frozenset[str]:
        """Adapters alone if they are tuned, else everything, the vision tower too."""
        names = frozenset(name for name, _ in self.module.named_parameters())
        return self.trainable if isinstance(self.config.tune, LoraTuning) else names

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """The transformers' layers, the vision tower's too: what FSDP gathers one at a time."""
        return [module for module in self.module.modules() if isinstance(module, GradientCheckpointingLayer)]

    def metadata(self) -> dict[str, Any]:
        """All that ``construct.from_parts`` needs besides the weights; JSON."""
        config = self.config.model_dump(mode="json")
        return {"config": config, "spec": spec_to_json(self.spec), "bins": self.bins.to_lists()}

    def load(self, weights: Weights, version: int) -> None:
        load_strictly(self.module, weights)
        self._version = version

    @torch.no_grad()
    def act(self, obs: Observation, seeds: UInt32[np.ndarray, " N"], *, noise_scale: float = 1.0) -> Decision:
        """Write a chunk. ``noise_scale`` multiplies the Gumbel noise: 0 takes the most probable bin of each token."""
        inputs = self._tensors(self.prompter.encode(obs))
        none = inputs["ids"].new_empty((len(seeds), 0))
        noise = None
        if noise_scale:
            drawn = noise_scale * gumbel_noise(seeds, self.num_tokens, len(self._allowed))
            noise = torch.from_numpy(drawn).to(self._device)
        chooser = Chooser(self._allowed.to(self._device), self.config.temperature, noise)
        with self._autocast():
            self.module.generate(
                **self.prompter.forward_keys(inputs, none, is_generating=True),
                generation_config=self._generation,
                logits_processor=[chooser],
            )
        bins, logp = (value.cpu().numpy() for value in chooser.result())
        return self.decision(bins, logp)

    def decision(self, bins: Int[np.ndarray, "N S"], logp: Float[np.ndarray, "N S"]) -> Decision:
        """What the env executes for written bins."""
        return Decision(action=self.bins.decode(bins), logp=logp, trace={"bins": bins.astype(np.int16)})

    @torch.no_grad()
    def features(self, obs: Observation) -> Float[np.ndarray, "N W"]:
        """The transformer's last hidden state behind the prompt, for reward heads."""
        inputs = self._tensors(self.prompter.encode(obs))
        return self._hidden(inputs, inputs["ids"].new_empty((len(inputs["ids"]), 0)))[:, 0].cpu().numpy()

    def inputs(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> dict[str, np.ndarray]:
        """What ``means`` and ``score`` read, leaves "B ..."."""
        return {**self.prompter.encode(obs), "bins": trace["bins"].astype(np.int64), "executed": executed}

    def prepare(self, inputs: Inputs) -> Inputs:
        """With only the head trained the transformer runs here, once a batch."""
        if not isinstance(self.config.tune, HeadTuning):
            return inputs
        hidden = self._hidden(inputs, self._ids(inputs["bins"])[:, :-1])
        return {"hidden": hidden, "bins": inputs["bins"], "executed": inputs["executed"]}

    def means(self, inputs: Inputs) -> Float[Tensor, "B S D"]:
        """Log-probabilities of every bin, nats, float32: one forward over the prompt and the tokens written."""
        hidden = inputs["hidden"] if "hidden" in inputs else self._hidden(inputs, self._ids(inputs["bins"])[:, :-1])
        return log_probs(self._head(hidden, self._allowed.to(hidden.device)), self.config.temperature)

    def score(
        self, inputs: Inputs, reference: Float[Tensor, "B S D"] | None
    ) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"] | None]:
        """Log-probabilities and, given the reference's ``means``, the exact KL over the bins of each token; nats.

        Tokens of env steps that were not executed count as 0.
        """
        means = self.means(inputs)
        step = torch.arange(self.num_tokens, device=means.device) // self.spec.action_dim
        mask = step[None] < inputs["executed"][:, None]
        logp = means.gather(-1, inputs["bins"][..., None])[..., 0]
        logp = torch.where(mask, logp, 0.0)
        if reference is None:
            return logp, None
        divergence = (means.exp() * (means - reference)).sum(-1)
        return logp, torch.where(mask, divergence, 0.0)

    def imitation_inputs(self, obs: Observation) -> dict[str, np.ndarray]:
        return self.prompter.encode(obs)

    def imitation_loss(
        self, inputs: Inputs, action: Float[Tensor, "B H A"], generator: torch.Generator, samples: int
    ) -> Float[Tensor, ""]:
        """Cross-entropy of the demonstrated tokens over the whole vocabulary, nats a token. It needs no samples."""
        del generator, samples
        bins = torch.from_numpy(self.bins.encode(action.cpu().numpy())).to(action.device)
        ids = self._ids(bins)
        logits = self._head(self._hidden(inputs, ids[:, :-1]), None)
        return cross_entropy(logits.flatten(0, 1), ids.flatten())

    def _ids(self, bins: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
        return self._allowed.to(bins.device)[bins]

    def _hidden(self, inputs: Inputs, written: Int[Tensor, "B n"]) -> Float[Tensor, "B m W"]:
        """States that predict each written token and the one after them (m = n + 1), float32."""
        with self._autocast(), self._recomputing():
            out = self.module.model(**self.prompter.forward_keys(inputs, written), use_cache=False)
        # A product with a slice is computed another way if gradients are wanted (torch folds the batch then), and old
        # log-probs, which are computed without, would differ in their last bits.
        return out.last_hidden_state[:, -written.shape[1] - 1 :].float().contiguous()

    def _head(self, hidden: Float[Tensor, "B m W"], ids: Int[Tensor, " D"] | None) -> Float[Tensor, "B m V"]:
        """Logits of some vocabulary ids or of all, float32. No family has a bias or caps its logits."""
        kernel = self.module.lm_head.weight if ids is None else self.module.lm_head.weight[ids]
        return linear(hidden, kernel.float())

    @property
    def _device(self) -> torch.device:
        return self.module.lm_head.weight.device

    def _tensors(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return {name: from_array(value).to(self._device) for name, value in arrays.items()}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self.config.compute == "bfloat16")

    @contextlib.contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Activation checkpointing, of forwards that have a backward. transformers does it in training mode only, so
        the layers' own flag (not that of what is in them: dropout stays off) is set for the forward."""
        if not (self.config.checkpointing and torch.is_grad_enabled()):
            yield
            return
        layers = self.blocks
        self.module.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            self.module.gradient_checkpointing_disable()
            for layer in layers:
                layer.training = False
