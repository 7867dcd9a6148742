"""What a caller gives an Octo model, checked against what it was trained on before anything is compiled.

Observations and tasks have upstream's keys. Whatever can be derived may be left out: ``pad_mask_dict``, ``timestep``,
``timestep_pad_mask``, goal images (black, as upstream). What no tokenizer could read is refused.
Axes: B batch, T window, n language tokens, F their width.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Num

from vla_rlaif.policies.octo.instructions import IDS, MASK
from vla_rlaif.policies.octo.model import LANGUAGE, Inputs
from vla_rlaif.policies.octo.spec import ImageSpec, ModelSpec
from vla_rlaif.policies.octo.tokenizers import matching

WINDOW_OK, FLAGS = "timestep_pad_mask", "pad_mask_dict"
OF_TRAINING = frozenset({"timestep", "task_completed", WINDOW_OK, FLAGS})  # in every data set; no tokenizer reads them
Given = np.ndarray | jax.Array
Encode = Callable[[np.ndarray, np.ndarray], Float[np.ndarray, "B n F"]]  # (input_ids, attention_mask) -> features


@dataclass(frozen=True)
class Wanted:
    """What an array must look like. Leading axes (batch, window) may have any size."""

    lead: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join([*self.lead, *map(str, self.shape)])}]"

    def check(self, where: str, value: Any) -> None:
        """Raises ValueError; images that were scaled to [0, 1] and lists are refused, a wider float is not."""
        if not isinstance(value, np.ndarray | jax.Array):
            raise ValueError(f"{where} is a {type(value).__name__}, wanted an array {self}.")
        lead = len(self.lead)
        if value.shape[lead:] != self.shape or value.ndim != lead + len(self.shape):
            raise ValueError(f"{where} is {value.dtype} {list(value.shape)}, wanted {self}{self._advice(value)}.")
        if not np.can_cast(value.dtype, self.dtype, "same_kind"):
            raise ValueError(f"{where} is {value.dtype}, wanted {self}: convert it as the training data was.")

    def _advice(self, value: Given) -> str:
        if value.ndim != len(self.lead) + len(self.shape):
            return f": its axes are {', '.join(self.lead)} first"
        return ": resize it as wrappers.octo_stack does" if self.dtype == np.uint8 else ""


class InputRules:
    """Which keys a model reads, and what they must look like."""

    def __init__(self, spec: ModelSpec, example_batch: Mapping[str, Any], language: tuple[int, int] | None):
        """``language``: tokens and width of the features that the model reads; None if it reads none."""
        observation, task = example_batch["observation"], example_batch["task"]
        keys = sorted(observation.keys() - OF_TRAINING)
        self.language = language if spec.task_tokenizers else None
        self.max_horizon = spec.max_horizon
        self.reads = {name: _patterns(part, keys) for name, part in spec.observation_tokenizers}
        self.observation = {
            key: Wanted(("B", "T"), observation[key].shape[2:], observation[key].dtype)
            for key in sorted({key for found in self.reads.values() for key in found})
        }
        images = [part for _, part in spec.observation_tokenizers if isinstance(part, ImageSpec)]
        known = sorted({*self.observation, *task.keys() - OF_TRAINING})
        self.goals = {
            name: matching(part.task_stack_keys, known)
            for name, part in spec.observation_tokenizers
            if isinstance(part, ImageSpec)
        }
        film = {key for part in images for key in part.task_film_keys if key != LANGUAGE}
        self.task = {
            key: Wanted(("B",), task[key].shape[1:], task[key].dtype)
            if key in task
            else Wanted(("B",), self.observation[key].shape, self.observation[key].dtype)
            for key in sorted({*film, *(key for found in self.goals.values() for key in found)})
            if key in task or key in self.observation
        }
        self._flags = {*observation.get(FLAGS, {}), *observation}, {*task.get(FLAGS, {}), *task, LANGUAGE}

    def inputs(
        self,
        observations: Mapping[str, Any],
        tasks: Mapping[str, Any],
        timestep_pad_mask: Given | None,
        encode: Encode,
    ) -> Inputs:
        """For a forward pass. One task is repeated for every observation.

        Raises:
            ValueError: something is not read, of another shape or type than in training, or of another batch size.
        """
        absent = self._check_keys(observations, tasks)
        fed = {key: observations[key] for key in self.observation if key in observations}
        for key, value in fed.items():
            self.observation[key].check(f"observation {key}", value)
        batch, window = _one_size({f"observation {key}": value.shape[:2] for key, value in fed.items()})
        if window > self.max_horizon:
            raise ValueError(f"a window of {window} frames; the model has positions for {self.max_horizon}.")
        ok = observations.get(WINDOW_OK) if timestep_pad_mask is None else timestep_pad_mask
        images = {key for name in self.goals for key in self.reads[name] if key in fed}
        flags = _of(observations, FLAGS, self._flags[0])
        task, language_ok = self._task(fed, tasks, absent, batch, encode)
        return Inputs(
            observation={key: jnp.asarray(value) for key, value in fed.items()},
            task=task,
            frame_ok=_flag(WINDOW_OK, ok, (batch, window)),
            observation_ok={key: _flag(f"{FLAGS} {key}", flags.get(key), (batch, window)) for key in sorted(images)},
            language_ok=language_ok,
        )

    def _task(
        self, fed: Mapping[str, Given], tasks: Mapping[str, Any], absent: set[str], batch: int, encode: Encode
    ) -> tuple[dict[str, Num[jax.Array, "B ..."]], Bool[jax.Array, " B"] | None]:
        stacked = {key for name, keys in self.goals.items() if name not in absent for key in keys}
        films = self.task.keys() - {key for keys in self.goals.values() for key in keys}
        found = {key: tasks[key] for key in sorted(stacked | films) if key in tasks}
        for key, value in found.items():
            self.task[key].check(f"task {key}", value)
        if LANGUAGE in tasks and self.language is not None:
            found[LANGUAGE] = self._features(tasks[LANGUAGE], encode)
        flags = _of(tasks, FLAGS, self._flags[1])
        sizes = {f"task {key}": len(value) for key, value in found.items()}
        wrong = [f"{key} has {num}" for key, num in sizes.items() if num not in (1, batch)]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} rows, the observations {batch}: give one task, or one for each.")
        for key in sorted(stacked & fed.keys() - found.keys()):
            found[key] = np.zeros(self.task[key].shape, self.task[key].dtype)[None]
        repeated = {key: _repeated(value, batch) for key, value in found.items()}
        if LANGUAGE not in found:
            return repeated, None
        return repeated, _flag(f"task {FLAGS} {LANGUAGE}", flags.get(LANGUAGE), (batch,))

    def _features(self, language: Any, encode: Encode) -> Given:
        assert self.language is not None
        num, width = self.language
        if isinstance(language, Mapping):
            if missing := {IDS, MASK} - language.keys():
                raise ValueError(f"{LANGUAGE} has {', '.join(language)}; {', '.join(sorted(missing))} is missing.")
            ids, mask = np.asarray(language[IDS]), np.asarray(language[MASK])
            for name, value in ((IDS, ids), (MASK, mask)):
                Wanted(("B",), (num,), np.dtype(np.int64)).check(f"{LANGUAGE} {name}", value)
            language = encode(ids, mask)
        if isinstance(language, np.ndarray | jax.Array) and language.ndim == 2:
            language = language[:, None]
        if isinstance(language, str) or not isinstance(language, np.ndarray | jax.Array):
            raise ValueError(f"{LANGUAGE} is a {type(language).__name__}: make tasks with create_tasks(texts=[...]).")
        Wanted(("B",), (num, width), np.dtype(np.float32)).check(f"task {LANGUAGE}", language)
        return language

    def _check_keys(self, observations: Mapping[str, Any], tasks: Mapping[str, Any]) -> set[str]:
        """The observation tokenizers without input; a warning names them."""
        language = [LANGUAGE] if self.language is not None else []
        _refuse_unread("observation", observations, self.observation)
        _refuse_unread("task", tasks, [*self.task, *language])
        absent = set()
        for name, keys in self.reads.items():
            given = [key for key in keys if key in observations]
            if given and given != keys:
                raise ValueError(f"tokenizer {name} reads {', '.join(keys)} together; got only {', '.join(given)}.")
            if not given:
                absent.add(name)
        if absent == self.reads.keys():
            raise ValueError(f"the observations have none of {', '.join(self.observation)}, which the model reads.")
        silent = [f"{name} ({', '.join(keys)})" for name, keys in self.reads.items() if keys and name in absent]
        silent += [key for key in language if key not in tasks]
        if silent:
            here = str(Path(__file__).parent)
            warnings.warn(f"no input for {', '.join(silent)}: left out of the sequence.", skip_file_prefixes=(here,))
        return absent


def _patterns(part: Any, keys: list[str]) -> list[str]:
    patterns = part.obs_stack_keys if isinstance(part, ImageSpec) else part.obs_keys
    return matching(patterns, keys)


def _refuse_unread(what: str, given: Mapping[str, Any], read: Iterable[str]) -> None:
    unread = sorted(given.keys() - OF_TRAINING - set(read))
    if unread:
        raise ValueError(
            f"no tokenizer reads {', '.join(unread)} of the {what}; the model reads {', '.join(read) or 'nothing'}. "
            "Leave it out, or adapt the model."
        )


def _repeated(value: Given, batch: int) -> jax.Array:
    """One row for all, on the host if it is there: on the device every shape would be compiled."""
    shape = (batch, *value.shape[1:])
    if isinstance(value, np.ndarray):
        return jnp.asarray(np.broadcast_to(value, shape))
    return value if value.shape == shape else jnp.broadcast_to(value, shape)


def _one_size(sizes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    if len(set(sizes.values())) > 1:
        raise ValueError(f"batch and window differ: {', '.join(f'{k} has {v}' for k, v in sizes.items())}.")
    batch, window = next(iter(sizes.values()))
    return batch, window


def _of(given: Mapping[str, Any], key: str, known: set[str]) -> Mapping[str, Any]:
    flags = given.get(key, {})
    unknown = sorted(flags.keys() - known)
    if unknown:
        raise ValueError(f"{key} has {', '.join(unknown)}; known are {', '.join(sorted(known - OF_TRAINING))}.")
    return flags


def _flag(where: str, value: Any, shape: tuple[int, ...]) -> Bool[jax.Array, "..."]:
    """True where nothing is given; 0 and 1 may stand for booleans. A batch of one is repeated."""
    if value is None:
        return jnp.asarray(np.ones(shape, bool))
    if not isinstance(value, np.ndarray | jax.Array):
        raise ValueError(f"{where} is a {type(value).__name__}, wanted an array of booleans {list(shape)}.")
    if value.shape not in (shape, (1, *shape[1:])):
        raise ValueError(f"{where} has shape {list(value.shape)}, wanted booleans {list(shape)}.")
    host = np.asarray(value)
    if host.dtype != bool and not np.isin(host, (0, 1)).all():
        raise ValueError(f"{where} has values other than 0 and 1; wanted booleans {list(shape)}.")
    return jnp.asarray(np.broadcast_to(host.astype(bool), shape))
