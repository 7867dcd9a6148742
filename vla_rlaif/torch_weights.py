"""The weights of a torch module by name, as checkpoints and weight syncs carry them: NumPy on the host, float32."""

from collections.abc import Mapping

import numpy as np
import torch

from vla_rlaif.types import Weights

Tensors = Mapping[str, torch.Tensor]


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once, under their first name) and the buffers that are saved with them."""
    saved = module.state_dict(keep_vars=True)
    buffers = {name: value for name, value in module.named_buffers() if name in saved}
    return dict(module.named_parameters()) | buffers


def to_arrays(tensors: Tensors) -> dict[str, np.ndarray]:
    """Copies on the host; floating point is widened or rounded to float32."""
    return {name: np.array(_on_host(value)) for name, value in tensors.items()}


def as_arrays(tensors: Tensors) -> dict[str, np.ndarray]:
    """As ``to_arrays``, but what is float32 on the host already is not copied: for values that nobody changes."""
    return {name: _on_host(value) for name, value in tensors.items()}


def _on_host(value: torch.Tensor) -> np.ndarray:
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def from_array(value: np.ndarray) -> torch.Tensor:
    """Shares the memory of an array that may be written to; copies a read-only one, which torch would warn about."""
    return torch.from_numpy(value if value.flags.writeable else value.copy())


@torch.no_grad()
def load_strictly(module: torch.nn.Module, weights: Weights) -> None:
    """Set every parameter and saved buffer in place, in the dtype and on the device that it has.

    Raises:
        ValueError: a name is missing, unexpected, or has another shape; nothing is changed then.
    """
    tensors = named_tensors(module)
    missing, unexpected = sorted(tensors.keys() - weights.keys()), sorted(weights.keys() - tensors.keys())
    if missing:
        shapes = ", ".join(f"{name!r} of shape {tuple(tensors[name].shape)}" for name in missing[:3])
        raise ValueError(f"The weights lack {len(missing)} of {len(tensors)} tensors; they need {shapes}.")
    if unexpected:
        raise ValueError(f"The weights have {len(unexpected)} tensors that the policy lacks: {unexpected[:3]}.")
    for name, value in tensors.items():
        if weights[name].shape != tuple(value.shape):
            raise ValueError(
                f"The weights need {name!r} of shape {tuple(value.shape)}; they have {weights[name].shape}."
            )
    for name, value in tensors.items():
        new = from_array(np.asarray(weights[name]))
        if new.data_ptr() != value.data_ptr():  # a frozen tensor that the learner shares with this policy comes back
            value.copy_(new)
