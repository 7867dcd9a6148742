"""Gaussian policy with a mean linear in the state, in torch: the smallest policy that a TorchLearner can train.

Its parameters have the names and shapes of ``gaussian_jax.py``, and both draw the same noise.
Axes: see types.py; E = H * A, S = 1.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt32

from vla_rlaif.policies.specs import spec_from_json, spec_to_json
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.torch_weights import from_array, load_strictly, named_tensors
from vla_rlaif.types import Decision, EnvSpec, Observation, Weights

Inputs = Mapping[str, torch.Tensor]


class GaussianTorch:
    """Acts on ``obs.state`` only. The mean starts at 0."""

    def __init__(self, config: GaussianConfig, spec: EnvSpec, *, seed: int = 0):
        del seed  # nothing is drawn: the mean starts at 0
        self.config, self.spec = config, spec
        self._version = 0
        self._width = spec.chunk * spec.action_dim
        self.module = torch.nn.utils.skip_init(torch.nn.Linear, spec.state_dim, self._width).eval()
        for parameter in self.module.parameters():
            torch.nn.init.zeros_(parameter)

    @classmethod
    def from_parts(cls, config: GaussianConfig, metadata: Mapping[str, Any], weights: Weights) -> "GaussianTorch":
        policy = cls(config, spec_from_json(metadata["spec"]))
        policy.load(weights, 0)
        return policy

    window = 1

    @property
    def version(self) -> int:
        return self._version

    @property
    def params(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in named_tensors(self.module).items()}

    @property
    def trainable(self) -> frozenset[str]:
        return frozenset(self.params)

    @property
    def imitable(self) -> frozenset[str]:
        return frozenset(self.params)

    def metadata(self) -> dict[str, Any]:
        """All that ``from_parts`` needs besides the weights; JSON."""
        return {"config": self.config.model_dump(mode="json"), "spec": spec_to_json(self.spec)}

    def load(self, weights: Weights, version: int) -> None:
        load_strictly(self.module, weights)
        self._version = version

    @torch.no_grad()
    def act(self, obs: Observation, seeds: UInt32[np.ndarray, " N"], *, noise_scale: float = 1.0) -> Decision:
        mean = self.module(torch.tensor(obs.state)).numpy()
        noise = np.stack([np.random.default_rng(int(s)).standard_normal(self._width, np.float32) for s in seeds])
        sample = mean + np.float32(noise_scale * self.config.std) * noise
        inputs = self.inputs(obs, {"sample": sample}, np.full(len(sample), self.spec.chunk))
        logp, _ = self.score({name: from_array(value) for name, value in inputs.items()}, None)
        action = np.clip(sample, -1.0, 1.0).reshape(-1, self.spec.chunk, self.spec.action_dim)
        return Decision(action=action, logp=logp.numpy(), trace={"sample": sample})

    def features(self, obs: Observation) -> Float[np.ndarray, "N D"]:
        """What this policy sees: the state, for reward heads."""
        return obs.state.astype(np.float32)

    def inputs(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> dict[str, np.ndarray]:
        """What ``means`` and ``score`` read, leaves "B ..."."""
        return {"state": obs.state, "sample": trace["sample"], "executed": executed}

    def prepare(self, inputs: Inputs) -> Inputs:
        """Nothing is frozen, so there is nothing to run ahead of ``means`` and ``score``."""
        return inputs

    def means(self, inputs: Inputs) -> Float[torch.Tensor, "B 1 E"]:
        return self.module(inputs["state"])[:, None]

    def score(
        self, inputs: Inputs, reference: Float[torch.Tensor, "B 1 E"] | None
    ) -> tuple[Float[torch.Tensor, "B 1"], Float[torch.Tensor, "B 1"] | None]:
        """Log-probability and divergence over the dims of the executed env steps, nats."""
        means, executed = self.means(inputs), inputs["executed"]
        steps = torch.arange(self.spec.chunk, device=executed.device)[None] < executed[:, None]
        mask = steps.repeat_interleave(self.spec.action_dim, dim=1)[:, None]
        density = torch.distributions.Normal(means, self.config.std).log_prob(inputs["sample"][:, None])
        logp = torch.where(mask, density, 0.0).sum(-1)
        if reference is None:
            return logp, None
        divergence = 0.5 * torch.square((means - reference) / self.config.std)
        return logp, torch.where(mask, divergence, 0.0).sum(-1)

    def imitation_inputs(self, obs: Observation) -> dict[str, np.ndarray]:
        return {"state": obs.state}

    def imitation_loss(
        self, inputs: Inputs, action: Float[torch.Tensor, "B H A"], generator: torch.Generator, samples: int
    ) -> Float[torch.Tensor, ""]:
        """Negative log-density of the demonstrated chunks but for its constant, nats. It needs no samples."""
        del generator, samples
        error = (self.means(inputs)[:, 0] - action.flatten(1)) / self.config.std
        return 0.5 * torch.square(error).sum(-1).mean()
