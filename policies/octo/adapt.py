"""A checkpoint for another robot: the edited spec, and which parameters the edited network takes over.

The names of parameters are '/'-joined. Patterns are those of fnmatch, on whole names; ``*`` also matches '/'.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from vla_rlaif.policies.octo.spec import EncoderSpec, HeadSpec, ImageSpec, LowdimSpec, ModelSpec, ObservationSpec

PROPRIO = LowdimSpec(obs_keys=("proprio",))  # one token for every number of the robot's state


class Reshaped(NamedTuple):
    """A parameter whose shape in the checkpoint is not the wanted one."""

    name: str
    had: tuple[int, ...]
    wants: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """Where every parameter came from. copied, initialised and reshaped together are the wanted ones.

    A reshaped parameter starts from its initial value, as an initialised one does.
    """

    copied: tuple[str, ...]
    initialised: tuple[str, ...]  # not in the checkpoint, or skipped
    reshaped: tuple[Reshaped, ...]
    unused: tuple[str, ...]  # in the checkpoint, not wanted

    def __str__(self) -> str:
        reshaped = [r.name for r in self.reshaped]
        wanted = [*self.copied, *self.initialised, *reshaped]
        loaded = [*self.copied, *reshaped, *self.unused]
        groups = Counter(name.split("/")[0] for name in self.copied)
        lines = [
            f"copied {len(self.copied)} of {len(wanted)}: "
            + (", ".join(f"{k} {n}" for k, n in groups.items()) or "none"),
            f"initialised {len(self.initialised)}: {listed(self.initialised, wanted)}",
            f"reshaped {len(self.reshaped)}: " + (shapes(self.reshaped, wanted) or "none"),
            f"unused {len(self.unused)}: {listed(self.unused, loaded)}",
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, list[Any]]:
        """Plain lists."""
        reshaped = [{"name": r.name, "had": list(r.had), "wants": list(r.wants)} for r in self.reshaped]
        plain = {k: list(vars(self)[k]) for k in ("copied", "initialised", "unused")}
        return {**plain, "reshaped": reshaped}


def merge(
    loaded: Mapping[str, np.ndarray],
    wanted: Mapping[str, np.ndarray],
    *,
    allow_new: tuple[str, ...] = (),
    skip: tuple[str, ...] = (),
) -> tuple[dict[str, np.ndarray], MergeReport]:
    """The wanted parameters, with the loaded value wherever name and shape are the same, as upstream does it.

    Nothing else is taken over. A position table for another horizon or another number of tokens counts as reshaped:
    its rows are not cut or stretched, so keep the checkpoint's ``max_horizon`` and image sizes to keep its tables.

    Args:
        wanted: freshly initialised values of the whole network.
        allow_new: patterns of wanted names that may start from their initial value.
        skip: patterns of loaded names to leave behind, wanted or not.

    Raises:
        ValueError: a parameter is new, reshaped or unused and no pattern covers it; a pattern matches no name; or a
            loaded value is of another dtype.
    """
    _refuse_idle(allow_new, wanted, "allow_new", "wanted")
    _refuse_idle(skip, loaded, "skip", "checkpoint's")
    left = {name: value for name, value in loaded.items() if not _matches(name, skip)}
    other = [n for n, value in left.items() if n in wanted and value.dtype != wanted[n].dtype]
    if other:
        raise ValueError(f"{other[0]} is {left[other[0]].dtype} in the checkpoint, wanted {wanted[other[0]].dtype}.")
    copied = {name: left[name] for name, value in wanted.items() if name in left and left[name].shape == value.shape}
    report = MergeReport(
        copied=tuple(copied),
        initialised=tuple(name for name in wanted if name not in left),
        reshaped=tuple(Reshaped(n, left[n].shape, v.shape) for n, v in wanted.items() if n in left and n not in copied),
        unused=tuple(name for name in loaded if name not in wanted),
    )
    _refuse_surprises(report, loaded, wanted, allow_new, skip)
    return {**wanted, **copied}, report


def _refuse_surprises(
    report: MergeReport,
    loaded: Iterable[str],
    wanted: Iterable[str],
    allow_new: tuple[str, ...],
    skip: tuple[str, ...],
) -> None:
    new = [n for n in report.initialised if not _matches(n, allow_new) and not _matches(n, skip)]
    reshaped = [r for r in report.reshaped if not _matches(r.name, allow_new)]
    unused = [n for n in report.unused if not _matches(n, skip)]
    if not new and not reshaped and not unused:
        return
    lines = ["the checkpoint does not fit the wanted network."]
    if new:
        lines.append(f"Not in the checkpoint: {listed(new, wanted)}.")
    if reshaped:
        lines.append(f"Of another shape: {shapes(reshaped, wanted)}.")
    if unused:
        lines.append(f"In the checkpoint but not wanted: {listed(unused, loaded)}.")
    fixes = []
    if new or reshaped:
        fixes.append(
            f"allow_new={(*allow_new, *collapse([*new, *(r.name for r in reshaped)], wanted))} to start them anew"
        )
    if unused:
        fixes.append(f"skip={(*skip, *collapse(unused, loaded))} to leave them behind")
    lines.append(f"If that is meant, pass {', and '.join(fixes)}; else build the network of the checkpoint's config.")
    raise ValueError("\n".join(lines))


def _refuse_idle(patterns: tuple[str, ...], names: Iterable[str], argument: str, whose: str) -> None:
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            groups = sorted({"/".join(name.split("/")[:2]) for name in names})
            raise ValueError(
                f"{argument} has {pattern!r}, which matches none of the {len(names)} {whose} parameters; "
                f"they start with {', '.join(groups)}. Patterns match whole names: '*wrist*', not 'wrist'."
            )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def collapse(names: Iterable[str], universe: Iterable[str]) -> list[str]:
    """The fewest patterns of the form ``prefix/*``, and full names, that match exactly ``names`` among ``universe``."""
    names = sorted(names)
    inside, total = Counter(_prefixes(names)), Counter(_prefixes(universe))
    found = dict.fromkeys(
        next((f"{p}/*" for p in _prefixes([name]) if inside[p] == total[p] and total[p] > 1), name) for name in names
    )
    return list(found)


def _prefixes(names: Iterable[str]) -> Iterable[str]:
    return (name[:i] for name in names for i, letter in enumerate(name) if letter == "/")


def listed(names: Iterable[str], universe: Iterable[str]) -> str:
    """Names for a message: whole groups of ``universe`` as one pattern with its count."""
    names = list(names)
    patterns = collapse(names, universe)
    counts = [sum(fnmatchcase(name, pattern) for name in names) for pattern in patterns]
    shown = [f"{p} ({n})" if p.endswith("/*") else p for p, n in zip(patterns, counts, strict=True)]
    return ", ".join(shown) or "none"


def shapes(reshaped: Iterable[Reshaped], universe: Iterable[str]) -> str:
    """Names with both shapes, for a message; from the 13th on as ``listed`` has them."""
    reshaped = list(reshaped)
    shown = [f"{r.name} had {r.had} wants {r.wants}" for r in reshaped[:12]]
    if reshaped[12:]:
        shown.append(f"and others: {listed([r.name for r in reshaped[12:]], universe)}")
    return ", ".join(shown)


def adapted_spec(
    spec: ModelSpec,
    *,
    cameras: Mapping[str, str] | None = None,
    encoder: EncoderSpec | None = None,
    add_lowdim: Mapping[str, LowdimSpec] | None = None,
    drop: tuple[str, ...] = (),
    head: HeadSpec | None = None,
    action_horizon: int | None = None,
    action_dim: int | None = None,
) -> ModelSpec:
    """The spec for another robot. What is not mentioned stays.

    Args:
        cameras: all image tokenizers wanted, by name, with the observation key each reads. Those of ``spec`` that are
            not named are dropped; new ones are like its first, goal image included.
        encoder: of the new image tokenizers, in place of the first one's.
        add_lowdim: new tokenizers of numbers, such as ``{"proprio": PROPRIO}``.
        drop: names of observation or task tokenizers to leave out.
        head: in place of the action head. The horizon and dimension of either can be changed alone.

    Raises:
        ValueError: a name that does not exist, or exists already; a camera that two tokenizers would read.
    """
    known = [name for name, _ in (*spec.observation_tokenizers, *spec.task_tokenizers)]
    for name in drop:
        if name not in known:
            raise ValueError(f"there is no tokenizer {name!r} to drop; the model has {', '.join(known)}.")
    parts = {name: part for name, part in spec.observation_tokenizers if name not in drop}
    if cameras is not None:
        parts = _with_cameras(spec, parts, cameras, encoder)
    elif encoder is not None:
        raise ValueError("an encoder was given without cameras: name the cameras that it is for.")
    _check_new(add_lowdim or {}, parts)
    parts.update(add_lowdim or {})
    if not parts:
        raise ValueError(f"no observation tokenizer is left of {', '.join(dict(spec.observation_tokenizers))}.")
    sizes = {"action_horizon": action_horizon, "action_dim": action_dim}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}, wanted at least 1.")
    action = dataclasses.replace(head or spec.head, **{k: v for k, v in sizes.items() if v is not None})
    edited = dataclasses.replace(
        spec,
        observation_tokenizers=tuple(parts.items()),
        task_tokenizers=tuple((name, part) for name, part in spec.task_tokenizers if name not in drop),
        heads=tuple((name, action if name == "action" else part) for name, part in spec.heads),
    )
    return ModelSpec.from_official(edited.to_official())  # checks it as a folder's config is checked


def _with_cameras(
    spec: ModelSpec, parts: Mapping[str, ObservationSpec], cameras: Mapping[str, str], encoder: EncoderSpec | None
) -> dict[str, ObservationSpec]:
    images = [part for _, part in spec.observation_tokenizers if isinstance(part, ImageSpec)]
    _check_new([name for name in cameras if name in parts and not isinstance(parts[name], ImageSpec)], parts)
    found = {name: part for name, part in parts.items() if name in cameras or not isinstance(part, ImageSpec)}
    for name, key in cameras.items():
        part = found.get(name)
        if isinstance(part, ImageSpec) and _reads(part, key):
            continue
        if isinstance(part, ImageSpec):
            like = part
        elif encoder is not None:
            like = dataclasses.replace(images[0], encoder=encoder) if images else ImageSpec(encoder=encoder)
        elif images:
            like = images[0]
        else:
            raise ValueError(f"the model has no image tokenizer that {name!r} could be like: give its encoder.")
        goal = (key,) if like.task_stack_keys else ()
        found[name] = dataclasses.replace(like, obs_stack_keys=(key,), task_stack_keys=goal)
    for key in cameras.values():
        readers = [name for name, part in found.items() if isinstance(part, ImageSpec) and _reads(part, key)]
        if len(readers) > 1:
            raise ValueError(
                f"{key!r} would be read by the tokenizers {', '.join(readers)}: their keys are matched from the start "
                "only. Rename the observation key so that it does not begin with another camera's."
            )
    return found


def _reads(part: ImageSpec, key: str) -> bool:
    return any(re.match(pattern, key) for pattern in part.obs_stack_keys)


def _check_new(names: Iterable[str], parts: Mapping[str, ObservationSpec]) -> None:
    for name in names:
        if name in parts:
            raise ValueError(f"there is already a tokenizer {name!r}: drop it first. The model has {', '.join(parts)}.")
