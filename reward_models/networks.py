"""Networks of the preference reward: an ensemble of small heads in one batched matmul, and a CNN torso before it.

Axes: E ensemble members, B rows, D input features, P the inputs that are not pixels, O outputs.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gelu


class Heads(nn.Module):
    """E independent MLPs without squashing: Bradley-Terry only reads differences. Outputs share the layers below."""

    def __init__(
        self, num_members: int, dim: int, hidden: tuple[int, ...], rng: torch.Generator, *, num_outputs: int = 1
    ) -> None:
        super().__init__()
        sizes = (dim, *hidden, num_outputs)
        self.weight = nn.ParameterList(
            nn.Parameter(torch.randn(num_members, i, o, generator=rng) * i**-0.5) for i, o in pairwise(sizes)
        )
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(num_members, 1, o)) for o in sizes[1:])

    def forward(self, x: Float[Tensor, "E B D"]) -> Float[Tensor, "E B O"]:
        for i, (weight, bias) in enumerate(zip(self.weight, self.bias, strict=True)):
            x = torch.baddbmm(bias, gelu(x, approximate="tanh") if i else x, weight)
        return x


@dataclass(frozen=True, kw_only=True)
class CnnConfig:
    """A CNN trained jointly with the heads on the pixels of ``encoders.PixelEncoder``, and shared by the members.

    It learns slowly from hundreds of pairs: in the feasibility run 0.68 held-out accuracy against 0.83 for frozen
    features of the policy. It is for tasks where no frozen features exist.
    """

    num_cameras: int
    image_size: int  # pixels, as given to PixelEncoder
    width: int = 32
    dim: int = 64  # features per frame


class CnnTorso(nn.Module):
    """Pixels to features; the other inputs pass through unchanged."""

    def __init__(self, config: CnnConfig, dim: int, rng: torch.Generator) -> None:
        super().__init__()
        self.config = config
        self.num_pixels = 3 * config.num_cameras * config.image_size**2
        w = config.width
        side = -(-config.image_size // 8)  # pixels after three strides of 2
        with torch.device("meta"):  # PyTorch's own initialisation would draw from the global generator
            self.conv = nn.Sequential(
                nn.Conv2d(3 * config.num_cameras, w, 3, stride=2, padding=1),
                nn.GELU(),
                nn.Conv2d(w, w, 3, stride=2, padding=1),
                nn.GELU(),
                nn.Conv2d(w, w, 3, stride=2, padding=1),
                nn.GELU(),
                nn.Flatten(),
                nn.Linear(w * side**2, config.dim),
            )
        self.conv.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in self.conv.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=rng)
                else:
                    parameter.zero_()
        self.out_dim = config.dim + dim - self.num_pixels

    def forward(self, x: Float[Tensor, "E B D"]) -> Float[Tensor, "E B out"]:
        flat = x.reshape(-1, x.shape[-1])
        size = self.config.image_size
        pixels = flat[:, : self.num_pixels].reshape(len(flat), -1, size, size)
        features = torch.cat([self.conv(pixels), flat[:, self.num_pixels :]], dim=1)
        return features.reshape(*x.shape[:2], -1)


class Network(nn.Module):
    """The torso, if there is one, and the heads."""

    def __init__(
        self,
        *,
        num_members: int,
        dim: int,
        hidden: tuple[int, ...],
        cnn: CnnConfig | None,
        rng: torch.Generator,
        num_outputs: int = 1,
    ) -> None:
        super().__init__()
        self.torso = None if cnn is None else CnnTorso(cnn, dim, rng)
        features = dim if self.torso is None else self.torso.out_dim
        self.heads = Heads(num_members, features, hidden, rng, num_outputs=num_outputs)

    @property
    def num_members(self) -> int:
        return self.heads.weight[0].shape[0]

    def forward(self, x: Float[Tensor, "E B D"]) -> Float[Tensor, "E B O"]:
        return self.heads(x if self.torso is None else self.torso(x))
