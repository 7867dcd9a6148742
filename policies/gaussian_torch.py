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
from vla_rlaif.types import Decision, EnvSpec, Observation, Weights

Params = Mapping[str, torch.Tensor]


class GaussianTorch:
    """Acts on ``obs.state`` only. The mean starts at 0."""

    def __init__(self, config: GaussianConfig, spec: EnvSpec, *, seed: int = 0):
        del seed  # nothing is drawn: the mean starts at 0
        self.config, self.spec = config, spec
        self._version = 0
        self._width = spec.chunk * spec.action_dim
        self.module = torch.nn.utils.skip_init(torch.nn.Linear, spec.state_dim, self._width)
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
    def params(self) -> Params:
        return dict(self.module.named_parameters())

    @property
    def trainable(self) -> frozenset[str]:
        return frozenset(self.params)

    def metadata(self) -> dict[str, Any]:
        """All that ``from_parts`` needs besides the weights; JSON."""
        return {"config": self.config.model_dump(mode="json"), "spec": spec_to_json(self.spec)}

    def load(self, weights: Weights, version: int) -> None:
        for name, value in self.module.state_dict().items():
            if name not in weights or weights[name].shape != tuple(value.shape):
                raise ValueError(f"The weights need {name!r} of shape {tuple(value.shape)}.")
        self.module.load_state_dict({name: torch.tensor(np.asarray(value)) for name, value in weights.items()})
        self._version = version

    @torch.no_grad()
    def act(self, obs: Observation, seeds: UInt32[np.ndarray, " N"], *, noise_scale: float = 1.0) -> Decision:
        mean = self.module(torch.tensor(obs.state)).numpy()
        noise = np.stack([np.random.default_rng(int(s)).standard_normal(self._width, np.float32) for s in seeds])
        sample = mean + np.float32(noise_scale * self.config.std) * noise
        executed = np.full(len(sample), self.spec.chunk)
        logp, _ = self.score(self.params, self.inputs(obs, {"sample": sample}, executed))
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

    def means(self, params: Params, inputs: Mapping[str, Any]) -> Float[torch.Tensor, "B 1 E"]:
        state = torch.as_tensor(inputs["state"])
        return torch.func.functional_call(self.module, dict(params), (state,))[:, None]

    def score(
        self, params: Params, inputs: Mapping[str, Any], reference_means: Float[torch.Tensor, "B 1 E"] | None = None
    ) -> tuple[Float[torch.Tensor, "B 1"], Float[torch.Tensor, "B 1"] | None]:
        """Log-probability and divergence over the dims of the executed env steps, nats."""
        means = self.means(params, inputs)
        steps = torch.arange(self.spec.chunk)[None] < torch.as_tensor(inputs["executed"])[:, None]
        mask = steps.repeat_interleave(self.spec.action_dim, dim=1)[:, None]
        sample = torch.as_tensor(inputs["sample"])[:, None]
        density = torch.distributions.Normal(means, self.config.std).log_prob(sample)
        logp = torch.where(mask, density, 0.0).sum(-1)
        if reference_means is None:
            return logp, None
        divergence = 0.5 * torch.square((means - reference_means) / self.config.std)
        return logp, torch.where(mask, divergence, 0.0).sum(-1)
