"""A small torch policy with a frozen stem below a trained body: for the tests of what trains torch policies.

Axes: B decisions, X numbers of an input, E numbers of a chunk; S = 2 Gaussians a decision.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt32

from vla_rlaif.checkpoint import load_policy
from vla_rlaif.learning import Anchor
from vla_rlaif.torch_weights import load_strictly
from vla_rlaif.types import Batch, Decision, EnvSpec, Observation, Weights

X, WIDTH, E, S = 8, 8, 3, 2  # with 5 numbers of an input, rows are rounded by their place in a batch (MKL on AMD)
Inputs = Mapping[str, torch.Tensor]


class Network(torch.nn.Module):
    """``spare`` is in nothing, ``log_std`` is in the density only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(X, WIDTH)
        layer = torch.nn.Linear(WIDTH, WIDTH)
        self.block = torch.nn.Sequential(layer, torch.nn.LayerNorm(WIDTH), torch.nn.SiLU())
        self.head = torch.nn.Linear(WIDTH, S * E)
        self.log_std = torch.nn.Parameter(torch.full((S, 1), -1.0))
        self.spare = torch.nn.Parameter(torch.ones(3, 2))
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, E))
        self.shift: torch.Tensor
        generator = torch.Generator().manual_seed(0)
        for linear in (self.stem, layer, self.head):
            torch.nn.init.xavier_uniform_(linear.weight, generator=generator)
            torch.nn.init.uniform_(linear.bias, -0.1, 0.1, generator=generator)


class MlpPolicy:
    """``noise`` scales the random part of the imitation loss, ``compute`` is the precision of the body."""

    window = 1

    def __init__(self, *, noise: float = 0.0, compute: Literal["float32", "bfloat16"] = "float32"):
        self.noise, self.compute, self.version = noise, compute, 0
        self.module = Network().eval()

    @property
    def trainable(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.module.named_parameters() if not name.startswith("stem"))

    @property
    def imitable(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.module.named_parameters()) - {"log_std", "spare"}

    @property
    def blocks(self) -> tuple[torch.nn.Module, ...]:
        return (self.module.block,)

    def metadata(self) -> dict[str, Any]:
        return {"noise": self.noise}

    def load(self, weights: Weights, version: int) -> None:
        load_strictly(self.module, weights)
        self.version = version

    @torch.no_grad()
    def act(self, obs: Observation, seeds: UInt32[np.ndarray, " N"], *, noise_scale: float = 1.0) -> Decision:
        x = torch.tensor(obs.state)
        means = self.means({"features": torch.tanh(self.module.stem(x))})
        noise = np.stack([np.random.default_rng(int(s)).standard_normal((S, E), np.float32) for s in seeds])
        sample = means + noise_scale * self.module.log_std.exp() * torch.tensor(noise)
        logp, _ = self.score(self.prepare({"x": x, "sample": sample}), None)
        return Decision(action=sample.clip(-1, 1).numpy(), logp=logp.numpy(), trace={"sample": sample.numpy()})

    def inputs(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> dict[str, np.ndarray]:
        return {"x": obs.state, "sample": trace["sample"]}

    def prepare(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        if not inputs["x"].isfinite().all():
            raise ValueError("x is not finite; the camera is broken.")
        return {"features": torch.tanh(self.module.stem(inputs["x"])), "sample": inputs["sample"]}

    def means(self, inputs: Inputs) -> Float[torch.Tensor, "B 2 E"]:
        features = inputs["features"]
        with torch.autocast(features.device.type, torch.bfloat16, enabled=self.compute == "bfloat16"):
            flat = self.module.head(self.module.block(features))
        return flat.float().unflatten(1, (S, E)) + self.module.shift

    def score(
        self, inputs: Inputs, reference: Float[torch.Tensor, "B 2 E"] | None
    ) -> tuple[Float[torch.Tensor, "B 2"], Float[torch.Tensor, "B 2"] | None]:
        means, log_std = self.means(inputs), self.module.log_std
        logp = (-0.5 * torch.square((inputs["sample"] - means) / log_std.exp()) - log_std).mean(-1)
        if reference is None:
            return logp, None
        return logp, (0.5 * torch.square((means - reference) / log_std.exp())).mean(-1)

    def imitation_inputs(self, obs: Observation) -> dict[str, np.ndarray]:
        return {"x": obs.state}

    def imitation_loss(
        self, inputs: Inputs, action: Float[torch.Tensor, "B H A"], generator: torch.Generator, samples: int
    ) -> Float[torch.Tensor, ""]:
        means = self.means({"features": torch.tanh(self.module.stem(inputs["x"]))})
        noise = torch.randn((samples, *action.shape), generator=generator, device=action.device)
        return torch.square(means - action - self.noise * noise).mean()


def reload(folder: Path) -> MlpPolicy:
    metadata, weights = load_policy(folder)
    policy = MlpPolicy(noise=metadata["noise"])
    policy.load(weights, 0)
    return policy


def for_env(spec: EnvSpec, *, seed: int) -> MlpPolicy:
    """The factory of a custom policy; its sizes are its own."""
    return MlpPolicy()


def observations(num: int, seed: int) -> Observation:
    state = np.random.default_rng(seed).normal(size=(num, X)).astype(np.float32)
    return Observation(images={}, state=state, instruction=("",) * num)


def make_batch(num: int, seed: int, *, is_stale: bool = False) -> Batch:
    rng = np.random.default_rng((seed, 1))
    return Batch(
        obs=observations(num, seed),
        trace={"sample": rng.normal(size=(num, S, E)).astype(np.float32)},
        executed=np.ones(num, np.int64),
        advantage=rng.normal(size=num).astype(np.float32),
        mask=rng.random(num) < 0.9,
        num_valid=float(num),
        logp_acted=rng.normal(-1.0, 0.3, (num, S)).astype(np.float32) if is_stale else None,
    )


def make_anchor(coef: float = 0.5, *, batch: int = 8) -> Anchor:
    obs = observations(40, 9)
    teacher = np.random.default_rng(1).normal(size=(X, S * E))
    action = np.tanh(obs.state @ teacher).reshape(-1, S, E).astype(np.float32)
    return Anchor(obs=obs, action=action, coef=coef, batch=batch)
