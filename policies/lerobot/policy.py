"""A LeRobot policy as a policy of this system: acts, and scores its own chains again. ``construct.py`` makes them.

Axes: see types.py; K denoising steps, S stochastic ones, H' actions of the model's chunk (H of them are executed), W
action dims of the model (A of them are the env's), D = H' * W numbers, twice that where the spread is learned.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt32
from safetensors.torch import save_model
from torch.nn.functional import pad

from vla_rlaif.lerobot_config import FullTuning, HybridSampler, LeRobotConfig, SmolVLAConfig
from vla_rlaif.policies import flow
from vla_rlaif.policies.lerobot.denoisers import Denoiser, repeat_rows
from vla_rlaif.policies.lerobot.description import WEIGHTS, Description
from vla_rlaif.policies.lerobot.layout import LAYOUTS, Groups, matching
from vla_rlaif.policies.lerobot.network import Network, plain_policy
from vla_rlaif.policies.lerobot.processors import STATE, Processors
from vla_rlaif.policies.rows import distinct_rows
from vla_rlaif.policies.specs import spec_to_json
from vla_rlaif.torch_weights import from_array, load_strictly, named_tensors
from vla_rlaif.types import Decision, EnvSpec, Observation, Weights

Inputs = Mapping[str, torch.Tensor]
CONDITION = "condition/"  # prepared inputs: what the denoising steps read of the observation
FEATURE_BATCH = 64  # rows per call when computing features


class LeRobotPolicy:
    """Its chain has one Gaussian for each stochastic denoising step; the log-probability of a decision has S parts."""

    def __init__(
        self,
        config: SmolVLAConfig | LeRobotConfig,
        spec: EnvSpec,
        *,
        description: Description,
        network: Network,
        groups: Groups,
        denoiser: Denoiser,
        processors: Processors,
        origin: Mapping[str, Any],
        window: int = 1,
    ):
        """``origin`` is JSON that is stored with the policy besides its description."""
        self.config, self.spec, self.description, self.window = config, spec, description, window
        self.module, self.processors, self.origin = network, processors, origin
        self._groups, self._denoiser, self._version = groups, denoiser, 0
        device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        self.module.to(device)
        for name, value in self.module.named_parameters():
            value.requires_grad_(name in self.trainable)
        sampler = config.sampler
        self._num_stochastic = sampler.steps if isinstance(sampler, HybridSampler) else denoiser.num_steps

    @property
    def version(self) -> int:
        return self._version

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """On the host, in float32."""
        return {name: value.detach().cpu().float() for name, value in named_tensors(self.module).items()}

    @property
    def trainable(self) -> frozenset[str]:
        """What reinforcement learning changes."""
        return self._groups.trained(self.config.tune)

    @property
    def imitable(self) -> frozenset[str]:
        """What imitation changes: everything that an action depends on, but what is kept in bfloat16."""
        wide = {name for name, value in self.module.named_parameters() if value.dtype == torch.float32}
        return self._groups.used & wide

    @property
    def num_actions(self) -> int:
        """Actions that a decision predicts; imitation fits them all, also those that an env does not execute."""
        return self._denoiser.shape[0] - self._denoiser.offset

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """Modules that are used through ``__call__`` only, which FSDP may gather one by one."""
        parts = dict(self.module.policy.named_modules())
        names = matching(parts, LAYOUTS[self.description.type].blocks)
        return [part for name, part in parts.items() if name in names]

    def metadata(self) -> dict[str, Any]:
        """All that ``construct.from_parts`` needs besides the weights; JSON."""
        described = {"spec": spec_to_json(self.spec), "lerobot": self.description.to_json()}
        return {**self.origin, **described, "config": self.config.model_dump(mode="json")}

    def load(self, weights: Weights, version: int) -> None:
        load_strictly(self.module, weights)
        self._version = version

    def export(self, folder: Path, *, final: Path | None = None) -> None:
        """A `pretrained_model` folder that LeRobot loads, with adapters merged and without the noise head. ``final`` is
        where it will lie, if not there."""
        self.description.write(folder, final=final or folder)
        save_model(plain_policy(self.module), str(folder / WEIGHTS))

    @torch.no_grad()
    def act(self, obs: Observation, seeds: UInt32[np.ndarray, " N"], *, noise_scale: float = 1.0) -> Decision:
        """Choose a chunk. ``noise_scale`` multiplies the noise of the steps; where the chain starts is always drawn
        from the seed. With 0 it is the ODE, as LeRobot acts: it has no density, so its log-probabilities are NaN and
        its trace is empty."""
        x, trace, logp = self._sample(self._shared_condition(self.imitation_inputs(obs)), seeds, noise_scale)
        offset = self._denoiser.offset
        action = self.processors.executable(x[:, offset : offset + self.spec.chunk, : self.spec.action_dim])
        if noise_scale == 0:
            return Decision(action=action, logp=np.full(logp.shape, np.nan, np.float32), trace={})
        return Decision(action=action, logp=logp.cpu().numpy(), trace={k: v.cpu().numpy() for k, v in trace.items()})

    def _shared_condition(self, inputs: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """One prefix pass for rows that see the same."""
        rows, inverse = distinct_rows(inputs)
        condition = self._condition(self._on_device({name: value[rows] for name, value in inputs.items()}))
        if len(rows) == len(inverse):
            return condition
        return {name: value[torch.from_numpy(inverse).to(value.device)] for name, value in condition.items()}

    def _sample(
        self, condition: Inputs, seeds: UInt32[np.ndarray, " N"], noise_scale: float
    ) -> tuple[Float[torch.Tensor, "N Hm W"], dict[str, torch.Tensor], Float[torch.Tensor, "N S"]]:
        """(final state, states around the stochastic steps and which those are, log-probabilities)."""
        num, shape = self._num_stochastic, self._denoiser.shape
        first, x, noise = (v.to(next(iter(condition.values())).device) for v in self._draw(seeds))
        chain, logp = x.new_zeros(len(x), num + 1, *shape), x.new_zeros(len(x), num)
        counted = self._counted(torch.full_like(first, self.spec.chunk))
        row = torch.arange(len(x), device=x.device)
        for k in range(self._denoiser.num_steps):
            at = (k - first).clamp(0, num - 1)  # which of its stochastic steps a row is at, where it is at one
            inside = (k >= first) & (k < first + num)
            mean, std = self._denoiser.step(condition, x, torch.full_like(first, k), noise_scale * inside.float())
            after = mean + std * noise[row, at]
            std = torch.where(inside[:, None, None], std, 1.0)
            density = flow.reduce_dims(flow.log_density(after, mean, std), counted, self.config.logp_reduction)
            here, now = row[inside], at[inside]
            chain[here, now], chain[here, now + 1], logp[here, now] = x[inside], after[inside], density[inside]
            x = after
        return x, {"chain": chain, "step": first[:, None] + torch.arange(num, device=x.device)}, logp

    def _draw(
        self, seeds: UInt32[np.ndarray, " N"]
    ) -> tuple[Int[torch.Tensor, " N"], Float[torch.Tensor, "N Hm W"], Float[torch.Tensor, "N S Hm W"]]:
        """First stochastic step, start and noise of every row, from its seed alone, the same on every device."""
        num, shape = self._num_stochastic, self._denoiser.shape
        last = self._denoiser.num_steps - num
        rngs = [np.random.default_rng(int(seed)) for seed in seeds]
        start = np.stack([rng.standard_normal(shape, np.float32) for rng in rngs])  # first: the same for every sampler
        first = np.array([rng.integers(0, last + 1) for rng in rngs])
        noise = np.stack([rng.standard_normal((num, *shape), np.float32) for rng in rngs])
        return torch.from_numpy(first), torch.from_numpy(start), torch.from_numpy(noise)

    def inputs(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> dict[str, np.ndarray]:
        """What ``means`` and ``score`` read, leaves "B ..."."""
        stored = {"chain": trace["chain"], "step": trace["step"], "executed": executed}
        return stored | self.imitation_inputs(obs)

    def prepare(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """With the prefix embedded, if no trained parameter touches it and the settings let it stay on the device."""
        if isinstance(self.config.tune, FullTuning) or not self.config.cache_prefix:
            return dict(inputs)
        condition = self._condition(inputs)
        kept = {name: inputs[name] for name in ("chain", "step", "executed")}
        return kept | {CONDITION + name: value for name, value in condition.items()}

    def means(self, inputs: Inputs) -> Float[torch.Tensor, "B S D"]:
        """Of the stochastic steps; with a learned spread that too, after them."""
        mean, std = self._gaussians(inputs)
        flat = mean.flatten(2)
        if not self._learned_spread:
            return flat
        return torch.cat([flat, std.flatten(2)], dim=2)

    def score(
        self, inputs: Inputs, reference: Float[torch.Tensor, "B S D"] | None
    ) -> tuple[Float[torch.Tensor, "B S"], Float[torch.Tensor, "B S"] | None]:
        """Log-probability of stored chains, and the divergence from the policy that made ``reference``.

        Nats, over the env steps that were executed and the dims that the settings count: a mean or a sum.
        """
        mean, std = self._gaussians(inputs)
        mask, how = self._counted(inputs["executed"])[:, None], self.config.logp_reduction
        logp = flow.reduce_dims(flow.log_density(inputs["chain"][:, 1:], mean, std), mask, how)
        if reference is None:
            return logp, None
        num = mean.shape[2] * mean.shape[3]
        other_mean = reference[:, :, :num].reshape(mean.shape)
        other_std = reference[:, :, num:].reshape(mean.shape) if self._learned_spread else std
        return logp, flow.reduce_dims(flow.divergence(mean, std, other_mean, other_std), mask, how)

    def _gaussians(self, inputs: Inputs) -> tuple[Float[torch.Tensor, "B S Hm W"], Float[torch.Tensor, "B S h w"]]:
        """Mean and spread of every stochastic step of stored chains, ``fold`` steps in one forward."""
        chain, step = inputs["chain"], inputs["step"]
        condition = self._condition(inputs)
        num = step.shape[1]
        fold = self.config.fold or num
        means, stds = [], []
        for at in range(0, num, fold):
            x, index = chain[:, at : min(at + fold, num)], step[:, at : at + fold]
            rows = repeat_rows(condition, index.shape[1])
            ones = torch.ones(index.numel(), device=x.device)
            mean, std = self._denoiser.step(rows, x.flatten(0, 1), index.flatten(), ones)
            means.append(mean.unflatten(0, index.shape))
            stds.append(std.unflatten(0, index.shape))
        return torch.cat(means, dim=1), torch.cat(stds, dim=1)

    def _condition(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        ready = {k.removeprefix(CONDITION): v for k, v in inputs.items() if k.startswith(CONDITION)}
        return ready or self._denoiser.condition(self.processors.batch(inputs))

    def _counted(self, executed: Int[torch.Tensor, " B"]) -> Bool[torch.Tensor, "B Hm W"]:
        chunk, width = self._denoiser.shape
        dims = width if self.config.padded_dims == "score" else self.spec.action_dim
        return flow.counted(executed, chunk=chunk, width=width, dims=dims, offset=self._denoiser.offset)

    @property
    def _learned_spread(self) -> bool:
        return self.module.noise is not None

    def imitation_inputs(self, obs: Observation) -> dict[str, np.ndarray]:
        """What the model reads, leaves "B ..."."""
        return self.processors.encode(obs)

    def imitation_loss(
        self, inputs: Inputs, action: Float[torch.Tensor, "B H A"], generator: torch.Generator, samples: int
    ) -> Float[torch.Tensor, ""]:
        """LeRobot's loss of demonstrated chunks in env units, over the dims of the env."""
        if self.processors.relative:
            raise ValueError(
                "the policy's actions are relative to the state (use_relative_actions): not imitated here."
            )
        chunk, width = self._denoiser.shape
        normal = self.processors.normalise_action(action)
        offset = self._denoiser.offset
        normal = pad(normal, (0, width - normal.shape[2], offset, chunk - offset - normal.shape[1]))
        executed = torch.full((len(action),), action.shape[1], device=action.device)
        mask = flow.counted(executed, chunk=chunk, width=width, dims=self.spec.action_dim, offset=offset)
        batch = self.processors.batch(inputs)
        return self._denoiser.loss(batch, normal, mask, generator, samples)

    @torch.no_grad()
    def features(self, obs: Observation) -> Float[np.ndarray, "N D"]:
        """Features of frames for reward heads: what the prefix makes of them, and the normalised state."""
        inputs = self.imitation_inputs(obs)
        parts = []
        for at in range(0, len(obs.state), FEATURE_BATCH):
            rows = self._on_device({name: value[at : at + FEATURE_BATCH] for name, value in inputs.items()})
            found = self._denoiser.features(self.processors.batch(rows))
            parts.append(found.float().cpu().numpy())
        return np.concatenate([np.concatenate(parts), inputs[STATE]], axis=1)

    def _on_device(self, inputs: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        device = next(self.module.parameters()).device
        return {name: from_array(np.ascontiguousarray(value)).to(device) for name, value in inputs.items()}
