"""PPO's critic: a small value network on frozen features of what the policy saw, with an optimiser of its own.

Axes: N episodes, T decisions, D features, B decisions flattened.
"""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import nn

from vla_rlaif.algorithm_config import CriticConfig
from vla_rlaif.interfaces import Encoder
from vla_rlaif.ppo import PPO
from vla_rlaif.rollout import frames_at
from vla_rlaif.types import Episodes, Weights, under

FRAMES_PER_CALL = 256  # what the encoder sees at once
STD_FLOOR = 1e-2  # added to the std of every feature, in feature units


class Critic:
    """Values of decisions, in units of the reward. It sees a single frame, the instruction and how much of the episode
    is left; never success or truth. Untrained it says 0.

    Its features are standardised on the first episodes that it is trained on, and stay so.
    """

    def __init__(self, encoder: Encoder, config: CriticConfig, algorithm: PPO, *, seed: int) -> None:
        self._encoder, self._config, self._algorithm = encoder, config, algorithm
        self._network = _network((encoder.dim + 1, *config.hidden, 1), seed)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=config.lr)
        self._scale: dict[str, np.ndarray] = {}  # mean and std of the features

    def features(self, episodes: Episodes) -> Float[np.ndarray, "N T D"]:
        """Of every live decision, the share of the decisions that are left as the last of them; 0 elsewhere."""
        e = episodes
        n, t = np.nonzero(e.mask)
        values = np.zeros((*e.mask.shape, self._encoder.dim + 1), np.float32)
        for at in range(0, len(n), FRAMES_PER_CALL):
            rows, steps = n[at : at + FRAMES_PER_CALL], t[at : at + FRAMES_PER_CALL]
            seen = frames_at(e.images, e.state, e.instruction, rows, steps, 1)
            values[rows, steps, :-1] = self._encoder.encode(seen)
        values[n, t, -1] = 1 - t / e.mask.shape[1]
        return values

    def values(self, features: Float[np.ndarray, "*b D"]) -> Float[np.ndarray, "*b"]:
        if not self._scale:
            return np.zeros(features.shape[:-1], np.float32)
        with torch.no_grad():
            return self._network(torch.from_numpy(self._scaled(features)))[..., 0].numpy()

    def fit(
        self,
        features: Float[np.ndarray, "B D"],
        returns: Float[np.ndarray, " B"],
        value_old: Float[np.ndarray, " B"],
        *,
        seed: int,
    ) -> dict[str, float]:
        """All epochs on the decisions of a step. ``critic/explained`` is the share of the variance of the returns that
        the values before the fit explain: at most 1, and below 0 if a constant would do better."""
        if not len(returns):
            return {}
        if not self._scale:
            self._scale = {"mean": features.mean(axis=0), "std": features.std(axis=0) + np.float32(STD_FLOOR)}
        x, y = torch.from_numpy(self._scaled(features)), torch.tensor(returns, dtype=torch.float32)
        old, rng, losses = torch.tensor(value_old, dtype=torch.float32), np.random.default_rng((seed, 2)), []
        for _ in range(self._config.epochs):
            for rows in np.array_split(rng.permutation(len(y)), -(-len(y) // self._config.minibatch)):
                losses.append(self._step(x[rows], y[rows], old[rows]))
        spread = float(np.var(returns))
        explained = 1 - float(np.var(returns - value_old)) / spread if spread > 0 else float("nan")
        return {"critic/loss": float(np.mean(losses)), "critic/explained": explained}

    def _step(self, x: torch.Tensor, returns: torch.Tensor, value_old: torch.Tensor) -> float:
        self._optimizer.zero_grad()
        value, mask = self._network(x)[..., 0], torch.ones(len(x), dtype=torch.bool)
        loss = self._algorithm.value_loss(value, value_old, returns, mask, float(len(x)))
        (self._algorithm.value_coef * loss).backward()
        nn.utils.clip_grad_norm_(self._network.parameters(), self._config.max_grad_norm)
        self._optimizer.step()
        return loss.item()

    def _scaled(self, features: Float[np.ndarray, "*b D"]) -> Float[np.ndarray, "*b D"]:
        return ((features - self._scale["mean"]) / self._scale["std"]).astype(np.float32)

    def state(self) -> Weights:
        flat = {f"network/{k}": v.numpy().copy() for k, v in self._network.state_dict().items()}
        for name, value in self._network.named_parameters():
            moments: Mapping[str, torch.Tensor] = self._optimizer.state.get(value, {})
            flat |= {f"optimizer/{name}/{k}": v.numpy().copy() for k, v in moments.items()}
        return flat | {f"scale/{k}": v for k, v in self._scale.items()}

    def restore(self, state: Weights) -> None:
        self._scale = under("scale/", state)
        self._network.load_state_dict({k: torch.tensor(v) for k, v in under("network/", state).items()})
        for name, value in self._network.named_parameters():
            moments = {k: torch.tensor(v) for k, v in under(f"optimizer/{name}/", state).items()}
            if moments:
                self._optimizer.state[value] = moments


def _network(sizes: tuple[int, ...], seed: int) -> nn.Sequential:
    """An MLP whose last layer is 0."""
    generator, layers = torch.Generator().manual_seed(seed), list[nn.Module]()
    for number, (i, o) in enumerate(pairwise(sizes), 2):
        layer = nn.utils.skip_init(nn.Linear, i, o)  # PyTorch's own initialisation draws from the global generator
        assert isinstance(layer, nn.Linear)
        nn.init.normal_(layer.weight, 0.0, 0.0 if number == len(sizes) else i**-0.5, generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.SiLU()]
    return nn.Sequential(*layers[:-1])
