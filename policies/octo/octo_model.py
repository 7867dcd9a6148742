"""Octo as its users know it: load, make tasks, sample actions, train, save.

It stands beside ``OctoPolicy`` (policy.py), which is Octo for reinforcement learning in one environment. Observations
and tasks have upstream's keys and are batched: images [B T h w 3] and so on; see ``describe``. Functions are compiled
once for each spec and set of shapes, whatever the number of models.

    model = OctoModel.load(Path("octo-small-1.5"))
    tasks = model.create_tasks(texts=["pick up the spoon"])
    statistics = model.stats("bridge_dataset")["action"]
    for step in range(100):
        observations = {"image_primary": frames}  # uint8 [1 T 256 256 3]
        actions = model.sample_actions(observations, tasks, statistics=statistics, rng=jax.random.key(step))

Random numbers come from the ``rng`` of each call and from nowhere else: there is no default, because a key that is used
twice gives the same "random" action twice. Under ``with jax.threefry_partitionable(False):`` they are upstream's own.

Axes: B batch, T window, S noise draws, K denoising steps, H actions of a chunk, A dims of the statistics (without
statistics: of the head), D those of the head, E = H * D, *s the sample shape.
"""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from vla_rlaif.policies.octo.action_stats import ActionStatistics
from vla_rlaif.policies.octo.adapt import MergeReport, merge
from vla_rlaif.policies.octo.dataset_statistics import DatasetStatistics
from vla_rlaif.policies.octo.describe import describe
from vla_rlaif.policies.octo.forward import Draws, OctoForward, TokenGroup
from vla_rlaif.policies.octo.head_arguments import (
    Noise,
    action_statistics,
    check_draws,
    check_sampling,
    checked_actions,
    checked_noise,
    warn_if_stuck,
)
from vla_rlaif.policies.octo.initial import initial_params
from vla_rlaif.policies.octo.instructions import IDS, Instructions
from vla_rlaif.policies.octo.model import LANGUAGE, Inputs
from vla_rlaif.policies.octo.model_inputs import InputRules
from vla_rlaif.policies.octo.official import check_params, read_folder, statistics_for, write_folder
from vla_rlaif.policies.octo.spec import DiffusionSpec, ModelSpec
from vla_rlaif.policies.octo.tasks import make_tasks

T5 = "/hf_model/"  # in the names of the language encoder's parameters

_groups = jax.jit(OctoForward.groups, static_argnums=0)
_embedding = jax.jit(OctoForward.embedding, static_argnums=0)
_denoise = jax.jit(OctoForward.denoise, static_argnums=0)
_choose = jax.jit(OctoForward.choose, static_argnums=(0, 4, 5))
_noise = jax.jit(OctoForward.noise, static_argnums=(0, 2, 3, 4))
_draws = jax.jit(OctoForward.draws, static_argnums=(0, 2, 3))
_loss = jax.jit(OctoForward.loss, static_argnums=0)


def _scalar_loss(params: Mapping[str, jax.Array], forward: OctoForward, *args: Any) -> tuple[jax.Array, Any]:
    metrics = forward.loss(params, *args)
    return metrics["loss"], metrics


_gradients = jax.jit(jax.grad(_scalar_loss, has_aux=True), static_argnums=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class OctoModel:
    """A model and what it was trained on. Change one with ``dataclasses.replace``: other params, another spec."""

    spec: ModelSpec
    params: Mapping[str, jax.Array]  # on the device, by '/'-joined name; the language encoder is in ``instructions``
    example_batch: Mapping[str, Any]  # batch 1: what observations, tasks and actions look like
    statistics: DatasetStatistics  # as in the file; ``stats`` picks
    config: Mapping[str, Any]  # as in the file
    instructions: Instructions
    folder: Path | None = None  # where it came from

    @classmethod
    def load(cls, folder: Path, step: int | None = None, *, tokenizer: Path | None = None) -> "OctoModel":
        """Read an official folder, of the latest step by default.

        ``tokenizer`` is a folder with the T5 tokenizer.json, in place of the one that the config names.

        Raises:
            ValueError: the folder is not Octo's or damaged, or its parameters are not those of its config.
        """
        official = read_folder(folder, step)
        host = {name: value for name, value in official.params.items() if T5 in name}
        if len({name.split(T5)[0] for name in host}) > 1:
            raise ValueError(f"{folder} has several language encoders; one is supported.")
        text = official.config.get("text_processor")
        model = cls(
            spec=official.spec,
            params=jax.device_put({name: value for name, value in official.params.items() if T5 not in name}),
            example_batch=official.example_batch,
            statistics=official.statistics,
            config=official.config,
            instructions=Instructions(host, text_processor=text, near=folder, tokenizer=tokenizer),
            folder=folder,
        )
        model.check()
        return model

    @cached_property
    def forward(self) -> OctoForward:
        """The pure functions, for training loops of one's own; equal specs give equal (hashable) ones."""
        return OctoForward(self.spec)

    @cached_property
    def rules(self) -> InputRules:
        """Which inputs the model reads."""
        return InputRules(self.spec, self.example_batch, self._language)

    def check(self) -> None:
        """Raises ValueError unless the parameters are those of the spec, for inputs like the example."""
        other = tuple(f"heads_{name}/" for name, _ in self.spec.heads if name != "action")  # carried, never used
        own = {name: value.shape for name, value in self.params.items() if not name.startswith(other)}
        wanted = {name: leaf.shape for name, leaf in self._shapes().items()}
        check_params({name: np.broadcast_to(np.float32(), shape) for name, shape in own.items()}, wanted)

    def adapted(
        self,
        spec: ModelSpec,
        *,
        seed: int,
        example_batch: Mapping[str, Any] | None = None,
        allow_new: tuple[str, ...] = (),
        skip: tuple[str, ...] = (),
    ) -> tuple["OctoModel", MergeReport]:
        """The start of fine-tuning: a model of another spec (``adapt.adapted_spec``), with the parameters that fit.

        ``example_batch`` is one of the new data, if inputs or actions look different; ``seed`` draws what is new.

        Raises:
            ValueError: parameters are new or unused and no pattern allows it (see ``adapt.merge``).
        """
        other = dataclasses.replace(self, spec=spec, example_batch=example_batch or self.example_batch)
        loaded = {name: np.asarray(value) for name, value in self.params.items()}
        wanted = initial_params(other._shapes(), seed)
        params, report = merge(loaded, wanted, allow_new=allow_new, skip=skip)
        return dataclasses.replace(other, params=jax.device_put(params)), report

    def create_tasks(
        self,
        goals: Mapping[str, np.ndarray] | None = None,
        texts: Sequence[str] | None = None,
        *,
        allow_truncation: bool = False,
    ) -> dict[str, Any]:
        """Tasks as goal images [B h w 3] by key, as sentences, or as both.

        With sentences alone the goal images are black and marked as padding, as upstream; without sentences there is
        the empty one, or no ``language_instruction`` if the model has no text processor.

        Raises:
            ValueError: nothing is given, the model cannot read it, or a sentence is too long and may not be cut.
        """
        return make_tasks(
            goals,
            texts,
            read=self.rules.task,
            example=self.example_batch["task"],
            instructions=None if self.rules.language is None else self.instructions,
            allow_truncation=allow_truncation,
        )

    def stats(self, name: str | None = None) -> dict[str, Any]:
        """The ``action`` and, if measured, ``proprio`` statistics of a dataset; None if there is only one.

        Raises:
            ValueError: the model knows no such dataset, or several and none is named; the message lists them.
        """
        return statistics_for(self.statistics, name, action_dim=self.spec.head.action_dim)

    def readouts(
        self,
        observations: Mapping[str, Any],
        tasks: Mapping[str, Any],
        timestep_pad_mask: Bool[np.ndarray | jax.Array, "B T"] | None = None,
    ) -> dict[str, TokenGroup]:
        """What the transformer makes of every group of tokens (upstream's ``run_transformer``)."""
        return _groups(self.forward, self.params, self.inputs(observations, tasks, timestep_pad_mask))

    def sample_actions(
        self,
        observations: Mapping[str, Any],
        tasks: Mapping[str, Any],
        *,
        statistics: ActionStatistics | Mapping[str, Any] | None = None,
        timestep_pad_mask: Bool[np.ndarray | jax.Array, "B T"] | None = None,
        argmax: bool = False,
        sample_shape: tuple[int, ...] = (),
        rng: jax.Array | None = None,
        temperature: float = 1.0,
        noise: Noise | None = None,
    ) -> Float[np.ndarray, "*s B H A"]:
        """Chunks of actions for the last frame of each window. Most of them at the sampler's bound is a warning.

        Args:
            statistics: an ``action`` entry, to bring actions into the units of its dataset; those of a mapping are
                normal (mean, std), for percentiles give ``ActionStatistics`` of kind "bounds". None: normalised.
            timestep_pad_mask: False for frames that pad the window; in place of the observations' own.
            argmax: the likeliest bins, of a discrete head.
            rng: a key, another one for every call. Not needed with ``noise``, ``argmax``, or by a continuous head.
            temperature: of a discrete head.
            noise: for a diffusion head, the start and what is added after each step, at the last position.

        Raises:
            ValueError: an input is not what the model reads, or an argument means nothing to its head.
        """
        head = self.spec.head
        stats = action_statistics(statistics, head)
        dims = head.action_dim if stats is None else len(stats.mean)
        check_sampling(head, argmax=argmax, temperature=temperature, rng=rng, noise=noise)
        inputs = self.inputs(observations, tasks, timestep_pad_mask)
        embedding = _embedding(self.forward, self.params, inputs)[:, 0]
        if isinstance(head, DiffusionSpec):
            if noise is not None:
                x, z = checked_noise(head, noise, (*sample_shape, len(embedding)))
            else:
                x, z = _noise(self.forward, rng, sample_shape, *_batch_and_window(inputs))
            live = np.tile(np.arange(head.action_dim) < dims, head.action_horizon)
            action = np.asarray(_denoise(self.forward, self.params, embedding, x, z, live))
            warn_if_stuck(action[..., :dims], head.max_action)
        else:
            drawn = None if argmax else rng
            action = np.asarray(_choose(self.forward, self.params, embedding, drawn, sample_shape, float(temperature)))
        return action if stats is None else stats.unnormalise(action)

    def loss(
        self, batch: Mapping[str, Any], *, rng: jax.Array | None = None, draws: Draws | None = None
    ) -> dict[str, Float[jax.Array, ""]]:
        """Upstream's training loss over all positions of the window: ``loss`` and its metrics.

        ``batch`` has ``observation``, ``task``, ``action`` (normalised [B T H D]) and maybe ``action_pad_mask`` (False
        for actions that do not count). A diffusion head needs a key, or the ``draws`` themselves.
        """
        return _loss(self.forward, self.params, *self.training_inputs(batch, rng=rng, draws=draws))

    def gradients(
        self, batch: Mapping[str, Any], *, rng: jax.Array | None = None, draws: Draws | None = None
    ) -> tuple[dict[str, Float[jax.Array, "..."]], dict[str, Float[jax.Array, ""]]]:
        """Of the loss by every parameter (the language encoder is frozen), and the metrics."""
        grads, metrics = _gradients(self.params, self.forward, *self.training_inputs(batch, rng=rng, draws=draws))
        return grads, metrics

    def inputs(
        self,
        observations: Mapping[str, Any],
        tasks: Mapping[str, Any],
        timestep_pad_mask: Bool[np.ndarray | jax.Array, "B T"] | None = None,
    ) -> Inputs:
        """Checked, completed and on the device, with the sentences read: what ``forward`` takes."""
        return self.rules.inputs(observations, tasks, timestep_pad_mask, self.instructions.features)

    def training_inputs(
        self, batch: Mapping[str, Any], *, rng: jax.Array | None = None, draws: Draws | None = None
    ) -> tuple[Inputs, jax.Array, jax.Array, Draws | None]:
        """(inputs, action, action_ok, draws): what ``forward.loss`` takes."""
        inputs, head = self.inputs(batch["observation"], batch["task"]), self.spec.head
        size = _batch_and_window(inputs)
        action, ok = checked_actions(head, batch, size)
        if not isinstance(head, DiffusionSpec):
            return inputs, action, ok, None
        check_draws(head, rng, draws, size)
        return inputs, action, ok, _draws(self.forward, rng, *size) if draws is None else draws

    def save(self, folder: Path, step: int) -> None:
        """Write an official folder that upstream reads, or add a step to one. Tokenizer files are copied along.

        Raises:
            ValueError: the step exists, or the folder is another model's.
        """
        same = ModelSpec.from_official(self.config["model"]) == self.spec
        params = {**self.instructions.params, **{name: np.asarray(value) for name, value in self.params.items()}}
        write_folder(
            folder,
            step=step,
            params=dict(sorted(params.items())),
            config=self.config if same else {**self.config, "model": self.spec.to_official()},
            example_batch=self.example_batch,
            statistics=self.statistics,
        )
        name = (self.instructions.text_processor or {}).get("kwargs", {}).get("tokenizer_name")
        if self.folder is not None and name is not None and (self.folder / name).is_dir():
            shutil.copytree(self.folder / name, folder / name, dirs_exist_ok=True)

    def describe(self) -> str:
        """What the model reads and gives, for people."""
        own, encoder = (sum(v.size for v in part.values()) for part in (self.params, self.instructions.params))
        return describe(
            self.spec,
            self.rules,
            config=self.config,
            statistics=self.statistics,
            num_params=own,
            num_encoder_params=encoder,
        )

    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Of the parameters that the spec wants, for inputs like the example."""
        example, rules = self.example_batch, self.rules
        read = (rules.observation, example["observation"]), (rules.task, example["task"])
        observation, task = ({key: jnp.asarray(part[key]) for key in keys if key in part} for keys, part in read)
        if self.spec.task_tokenizers and LANGUAGE in example["task"]:
            task[LANGUAGE] = jnp.zeros((1, *self._example_language()))
        return self.forward.shapes(Inputs(observation, task))

    @property
    def _language(self) -> tuple[int, int] | None:
        """Tokens of a sentence and their width, as the parameters have them."""
        for name, _ in self.spec.task_tokenizers:
            table, kernel = (f"octo_transformer/task_{name}_{end}" for end in ("pos_embedding", "projection/kernel"))
            if table in self.params and kernel in self.params:
                return self.params[table].shape[1], self.params[kernel].shape[0]
        return None

    def _example_language(self) -> tuple[int, int]:
        """The same, as the training data and the encoder have them."""
        example, encoder = self.example_batch["task"][LANGUAGE], self.instructions.encoder
        if not isinstance(example, Mapping):
            return example.shape[1] if example.ndim == 3 else 1, example.shape[-1]
        width = encoder.width if encoder is not None else (self._language or (0, 0))[1]
        return example[IDS].shape[1], width


def _batch_and_window(inputs: Inputs) -> tuple[int, int]:
    assert inputs.frame_ok is not None
    batch, window = inputs.frame_ok.shape
    return batch, window
