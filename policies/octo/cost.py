"""What an Octo costs, counted from its spec: parameters, floating point operations, activations kept for a gradient.

A multiplication and its addition are two operations; what is done element by element is left out (3 % of Octo-Small's
forward pass). Light on purpose: ``vla-rlaif plan`` uses it, so neither jax nor flax is imported here.
Axes: T window, L tokens of the sequence, D token width, M hidden width of the MLP, H attention heads, S trained
denoising steps, E = action horizon * action dims.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vla_rlaif.policies.octo.recipe import PROPRIO, matching
from vla_rlaif.policies.octo.spec import (
    DiffusionSpec,
    ImageSpec,
    KeypointSpec,
    LowdimSpec,
    ModelSpec,
    StemSpec,
)

RGB = 3


class Part(NamedTuple):
    """Of one frame: what encodes it, and what comes out."""

    params: int
    flops: int
    kept: int  # numbers that a gradient needs
    tokens: int
    width: int


@dataclass(frozen=True, kw_only=True)
class OctoCost:
    """Counts for one model in one environment."""

    model: ModelSpec
    window: int
    pixels: Mapping[str, int]  # size of the image by observation key, of those that are fed
    state_dim: int  # numbers of proprioception
    language: tuple[int, int]  # tokens of a sentence and their width

    @property
    def parts(self) -> dict[str, Part]:
        """The observation groups that are fed, by tokenizer."""
        found: dict[str, Part] = {}
        for name, spec in self.model.observation_tokenizers:
            if isinstance(spec, ImageSpec):
                keys = matching(spec.obs_stack_keys, self.pixels)
                if keys:
                    goals = matching(spec.task_stack_keys, self.pixels)
                    channels = RGB * (len(keys) + len(goals))
                    found[name] = _image_part(spec, channels, self.pixels[keys[0]])
            elif matching(spec.obs_keys, [PROPRIO]):
                found[name] = _lowdim_part(spec, self.state_dim)
        return found

    @property
    def num_tokens(self) -> int:
        """L."""
        task = len(self.model.task_tokenizers) * self.language[0]
        step = sum(part.tokens for part in self.parts.values()) + sum(num for _, num in self.model.readouts)
        return task + self.window * (step + (task if self.model.repeat_task_tokens else 0))

    def parameters(self) -> dict[str, int]:
        """By part of the network: no language encoder, no word table, no cameras that are not fed."""
        model, width = self.model, self.model.token_embedding_size
        parts, (words, features) = list(self.parts.values()), self.language
        num_tasks = len(model.task_tokenizers)
        projections = num_tasks * dense(features, width) + sum(dense(part.width, width) for part in parts)
        per_step = sum(part.tokens for part in parts) + sum(num for _, num in model.readouts)
        positions = width * (num_tasks * words + model.max_horizon * per_step)
        block = 4 * dense(width, width) + dense(width, self._mlp) + dense(self._mlp, width) + 4 * width
        return {
            "stems": sum(part.params for part in parts),
            "tokens": projections + positions,
            "transformer": model.transformer.num_layers * block + 2 * width,
            "head": _head_params(model),
        }

    def adapter_parameters(self, rank: int, blocks: int) -> int:
        """Of low-rank adapters on ``blocks`` transformer blocks."""
        return blocks * rank * (8 * self.model.token_embedding_size + 2 * (self.model.token_embedding_size + self._mlp))

    def block_parameters(self) -> int:
        """Kernels of one transformer block: what adapters of that block are added to."""
        width = self.model.token_embedding_size
        return 4 * width**2 + 2 * width * self._mlp

    def encode_flops(self) -> int:
        """Pixels and words to the token sequence of one decision."""
        width, (words, features) = self.model.token_embedding_size, self.language
        observed = sum(part.flops + 2 * part.tokens * part.width * width for part in self.parts.values())
        return self.window * observed + len(self.model.task_tokenizers) * 2 * words * features * width

    def block_flops(self, first: int = 0, *, every_row: bool = False) -> int:
        """Transformer blocks from ``first`` on. Of the last one, only the rows that the head reads, unless all are
        wanted."""
        width, length = self.model.token_embedding_size, self.num_tokens
        rows = length if every_row else self._readouts
        whole = _block_flops(length, length, width, self._mlp)
        num = self.model.transformer.num_layers - first
        return max(0, num - 1) * whole + (_block_flops(length, rows, width, self._mlp) if num > 0 else 0)

    def head_flops(self) -> int:
        """One denoising step of one action chunk."""
        head, width = self._head, self.model.token_embedding_size
        numbers, hidden = head.action_horizon * head.action_dim, head.hidden_dim
        time = head.time_dim // 2 + 4 * head.time_dim**2
        joined = head.time_dim + width + numbers
        return 2 * (time + joined * hidden + head.num_blocks * 8 * hidden**2 + hidden * numbers)

    def pooling_flops(self) -> int:
        """What the head does once for a readout: nothing, or attention pooling."""
        width = self.model.token_embedding_size
        return 2 * (2 * self._readouts * width**2 + 10 * width**2) if self._head.use_map else 0

    def encode_kept(self) -> int:
        """Numbers kept for the gradient of the tokenizers, for one decision."""
        width = self.model.token_embedding_size
        return self.window * sum(part.kept for part in self.parts.values()) + 2 * self.num_tokens * width

    def block_kept(self, first: int = 0) -> tuple[int, int]:
        """The same for transformer blocks: (numbers in the compute dtype, attention weights).

        Calibrated on what XLA reserves (tests/test_plan.py): two copies of the attention weights, 12 of the residual
        width and 3 of the hidden width for a token; the last block makes keys and values only.
        """
        width, length = self.model.token_embedding_size, self.num_tokens
        num = max(0, self.model.transformer.num_layers - first - 1)
        weights = num * 2 * self.model.transformer.num_attention_heads * length**2
        last = 4 * length * width if self.model.transformer.num_layers > first else 0
        return num * length * (12 * width + 3 * self._mlp) + last, weights

    def head_kept(self) -> int:
        """The same for one denoising step of the head."""
        head = self._head
        numbers, hidden = head.action_horizon * head.action_dim, head.hidden_dim
        joined = head.time_dim + self.model.token_embedding_size + numbers
        return joined + hidden + head.num_blocks * 11 * hidden + 3 * numbers

    @property
    def _mlp(self) -> int:
        return self.model.transformer.mlp_dim

    @property
    def _readouts(self) -> int:
        return dict(self.model.readouts)[self._head.readout_key.removeprefix("readout_")]

    @property
    def _head(self) -> DiffusionSpec:
        head = self.model.head
        if not isinstance(head, DiffusionSpec):
            raise ValueError(f"{head.NAME} has no log-probabilities to learn from; use policy.new_head: true.")
        return head


def dense(inputs: int, outputs: int) -> int:
    """Parameters of a layer with biases."""
    return inputs * outputs + outputs


def _block_flops(length: int, rows: int, width: int, hidden: int) -> int:
    """Keys and values of all tokens; queries, attention, output and MLP of the wanted rows."""
    return 2 * (2 * length * width**2 + rows * (2 * width**2 + 2 * length * width + 2 * width * hidden))


def _image_part(spec: ImageSpec, channels: int, pixels: int) -> Part:
    """Raises ValueError for conditioned encoders: what conditions them is not known here."""
    encoder = spec.encoder
    if isinstance(encoder, KeypointSpec):
        return _keypoints(encoder, channels, pixels)
    if encoder.use_film:
        raise ValueError(f"{encoder.NAME} with use_film is not counted by plan.")
    params, flops, kept = 0, 0, 0
    side, inputs, patch = pixels, channels, encoder.patch_size
    if isinstance(encoder, StemSpec):
        layers = zip(encoder.features, encoder.kernel_sizes, encoder.strides, encoder.padding, strict=True)
        for features, kernel, stride, padding in layers:
            side = (side + 2 * padding - kernel) // stride + 1
            params += kernel**2 * inputs * features + 3 * features
            flops += 2 * kernel**2 * inputs * features * side**2
            kept += 3 * features * side**2
            inputs = features
        patch //= 16
    side //= patch
    width = encoder.num_features
    embedding = patch**2 * inputs
    part = Part(
        params + dense(embedding, width),
        flops + 2 * embedding * width * side**2,
        kept + width * side**2,
        side**2,
        width,
    )
    return _fewer_tokens(part, spec.num_tokens) if spec.use_token_learner else part


def _fewer_tokens(part: Part, num: int) -> Part:
    """Attention pooling of the patches (TokenLearner)."""
    width = part.width
    params = part.tokens * width + 2 * width + _map_head_params(width, num)
    flops = 2 * (2 * part.tokens * width**2 + num * (2 * part.tokens * width + 10 * width**2))
    return Part(part.params + params, part.flops + flops, part.kept + 4 * part.tokens * width, num, width)


def _keypoints(spec: KeypointSpec, channels: int, pixels: int) -> Part:
    side, width = -(-pixels // 4), spec.channels
    flops = 2 * side**2 * (36 * channels * width + 9 * width**2 + 2 * width)
    return Part(36 * channels * width + width + 9 * width**2 + width, flops, 4 * width * side**2, 1, 2 * width)


def _lowdim_part(spec: LowdimSpec, numbers: int) -> Part:
    return Part(0, 0, 0, numbers, spec.n_bins if spec.discretize else 1)


def _map_head_params(width: int, probes: int) -> int:
    mlp = dense(width, 4 * width) + dense(4 * width, width)
    return probes * width + 4 * dense(width, width) + 2 * width + mlp


def _head_params(model: ModelSpec) -> int:
    head, width = model.head, model.token_embedding_size
    if not isinstance(head, DiffusionSpec):
        raise ValueError(f"{head.NAME} has no log-probabilities to learn from; use policy.new_head: true.")
    numbers, hidden, time = head.action_horizon * head.action_dim, head.hidden_dim, head.time_dim
    block = dense(hidden, 4 * hidden) + dense(4 * hidden, hidden) + (2 * hidden if head.use_layer_norm else 0)
    condition = time // 2 + dense(time, 2 * time) + dense(2 * time, time)
    pooling = _map_head_params(width, 1) if head.use_map else 0
    joined = time + width + numbers
    return pooling + condition + dense(joined, hidden) + head.num_blocks * block + dense(hidden, numbers)
