"""All parameters of a LeRobot policy in one module, with those that this system adds.

Axes: R rows, H actions in a chunk, W action dims of the model.
"""

import copy
from collections.abc import Sequence
from typing import Any

import peft
import torch
from jaxtyping import Float
from lerobot.policies.pretrained import PreTrainedPolicy
from peft.tuners.lora import LoraLayer
from torch import nn

from vla_rlaif.lerobot_config import AdapterTuning
from vla_rlaif.policies.lerobot.layout import matching


class NoiseHead(nn.Module):
    """Standard deviation of every number of a step, from the state of the chain, the velocity there and the time."""

    def __init__(self, width: int, *, hidden: int, low: float, high: float):
        """Starts at the geometric mean of ``low`` and ``high``, normalised action units, for every input."""
        super().__init__()
        self.low, self.high = low, high
        self.read = nn.Linear(2 * width + 2, hidden)
        self.write = nn.Linear(hidden, width)
        nn.init.zeros_(self.write.weight)
        nn.init.zeros_(self.write.bias)

    def forward(
        self, x: Float[torch.Tensor, "R H W"], velocity: Float[torch.Tensor, "R H W"], time: Float[torch.Tensor, " R"]
    ) -> Float[torch.Tensor, "R H W"]:
        angle = (torch.pi * time)[:, None, None].expand(*x.shape[:2], 1)
        seen = torch.cat([x, velocity.detach(), torch.sin(angle), torch.cos(angle)], dim=-1)
        share = torch.sigmoid(self.write(nn.functional.silu(self.read(seen))))
        return self.low * (self.high / self.low) ** share


class Network(nn.Module):
    """The parameters."""

    policy: Any  # a PreTrainedPolicy; which attributes it has depends on its class
    noise: NoiseHead | None

    def __init__(self, policy: PreTrainedPolicy, noise: NoiseHead | None):
        super().__init__()
        self.policy, self.noise = policy, noise
        self.eval()


def add_adapters(policy: PreTrainedPolicy, expert: Sequence[str], tune: AdapterTuning, *, seed: int) -> None:
    """Put low-rank adapters, which change nothing yet, on the expert's linear layers that ``tune.targets`` names.

    Raises:
        ValueError: there are none.
    """
    linear = [name for name, part in policy.named_modules() if isinstance(part, nn.Linear)]
    inside = [name for name in linear if matching([f"{name}.weight"], expert)]
    targets = [name for name in inside if name.rpartition(".")[2] in tune.targets]
    if not targets:
        have = ", ".join(sorted({name.rpartition(".")[2] for name in inside}))
        raise ValueError(f"policy.tune.targets {list(tune.targets)} fits none of the action expert's layers {have}.")
    alpha: Any = tune.alpha  # peft's int may be a float
    config = peft.LoraConfig(r=tune.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, policy)


def plain_policy(network: Network) -> PreTrainedPolicy:
    """The LeRobot policy with adapters merged into what they adapt; a copy, if there are any."""
    adapted = [name for name, part in network.policy.named_modules() if isinstance(part, LoraLayer)]
    if not adapted:
        return network.policy
    policy = copy.deepcopy(network.policy)
    for name in adapted:
        layer = policy.get_submodule(name)
        assert isinstance(layer, LoraLayer)
        layer.merge()
        policy.set_submodule(name, layer.get_base_layer())
    del policy.peft_config  # peft's mark of a model that has adapters
    return policy
