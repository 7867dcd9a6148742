"""Tasks as the original Octo makes them: goal images, sentences, or both, with flags that say which are there.

Axes: B tasks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_rlaif.policies.octo.instructions import Instructions
from vla_rlaif.policies.octo.model import LANGUAGE
from vla_rlaif.policies.octo.model_inputs import FLAGS, OF_TRAINING, Wanted


def make_tasks(
    goals: Mapping[str, np.ndarray] | None,
    texts: Sequence[str] | None,
    *,
    read: Mapping[str, Wanted],
    example: Mapping[str, Any],
    instructions: Instructions | None,
    allow_truncation: bool,
) -> dict[str, Any]:
    """See ``OctoModel.create_tasks``. ``read`` are the goals that the model reads, ``example`` is a task of training;
    ``instructions`` is None for a model that reads no language."""
    if goals is None and texts is None:
        raise ValueError("create_tasks got neither goals nor texts.")
    if isinstance(texts, str) or (texts is not None and not len(texts)):
        raise ValueError(f"texts is {texts!r}, wanted a list of sentences.")
    tokens = None if instructions is None or not instructions.has_tokenizer else instructions.tokens
    if texts is not None and tokens is None:
        how = "reads no language" if instructions is None else "has no text processor; give it language features"
        raise ValueError(f"the model {how}, or make tasks of goals alone: it cannot read {texts[0]!r}.")
    num = len(texts) if texts is not None else len(next(iter((goals or {}).values()), ()))
    tasks: dict[str, Any] = {}
    if goals is None:
        others = {key: example[key] for key in example.keys() & OF_TRAINING - {FLAGS}}
        tasks |= {key: np.zeros((num, *wanted.shape), wanted.dtype) for key, wanted in read.items()}
        tasks |= {key: np.zeros((num, *value.shape[1:]), value.dtype) for key, value in others.items()}
    else:
        _check_goals(goals, num, read)
        tasks |= goals
    flags = {key: np.full(num, goals is not None) for key in tasks}
    if tokens is not None:
        sentences = [""] * num if texts is None else list(texts)
        tasks[LANGUAGE] = tokens(sentences, allow_truncation=allow_truncation)
    return {**tasks, FLAGS: {**flags, LANGUAGE: np.full(num, texts is not None)}}


def _check_goals(goals: Mapping[str, np.ndarray], num: int, read: Mapping[str, Wanted]) -> None:
    if not goals or goals.keys() - read.keys():
        known = ", ".join(read) or "none"
        raise ValueError(f"goals are {', '.join(goals) or 'empty'}; the model reads the goals {known}.")
    for key, value in goals.items():
        read[key].check(f"goal {key}", value)
        if len(value) != num:
            raise ValueError(f"goal {key} has {len(value)} rows, wanted {num}: one for each task.")
