"""Reference pages out of the code: every verb with its options, every key of a run and of a pool.

Names, types and defaults are read from the classes themselves, meanings from the comments beside their fields (which
are what `--help` shows too). `docs/hooks.py` puts the pages into the site when it is built.
"""

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from vla_rlaif import cli
from vla_rlaif.config import RunConfig
from vla_rlaif.label_page.verb import LabelByHand
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.verbs import VERBS as POOL_VERBS

PLAIN = {int: "int", float: "number", bool: "true or false", str: "text", Path: "path", date: "date", Any: "anything"}
PARSED = {  # what a string is parsed by, and how it is written
    "parse_duration": "duration, such as `90s` or `20m`",
    "parse_days": "days, such as `mon-fri`",
    "parse_day_time": 'time of day, such as `"06:00"`',
    "parse_week_time": "time of the week, such as `fri 22:00`",
    "parse_wall_time": "wall-clock time, such as `2026-11-02T13:00`",
}
BOUNDS = {annotated_types.Gt: ">", annotated_types.Ge: ">=", annotated_types.Lt: "<", annotated_types.Le: "<="}
RUNS = "Every key is a flag too: `--section.key value`. `vla-rlaif VERB CONFIG.yaml --help` shows a file's values."
NO_DEFAULT = "required"


def pages() -> dict[str, str]:
    """Path in the site -> markdown."""
    return {
        "reference/cli.md": cli_page(),
        "reference/config.md": config_page("Keys of a run", RUNS, RunConfig),
        "reference/pool.md": config_page(
            "Keys of a pool",
            "The file of `vla-rlaif pool plan`, `simulate`, `run`; [Day and night](../day_night.md) explains it.",
            PoolConfig,
        ),
    }


def cli_page() -> str:
    """Every verb."""
    verbs: dict[str, type] = {f"vla-rlaif {name}": kind for name, kind in cli.VERBS.items()}
    verbs["vla-rlaif label DATA --ui"] = LabelByHand
    verbs |= {f"vla-rlaif pool {name}": kind for name, kind in POOL_VERBS.items()}
    parts = [
        "# Commands",
        "Exit codes: 0 done, 1 a fault of the program or the machine, 2 a mistake in what was asked for.",
        "Where a verb takes `CONFIG`, every key of the run is an option as well, such as `--learner.lr 1e-4` "
        "(see [Keys of a run](config.md)).",
    ]
    for command, kind in verbs.items():
        parts += [f"## {command}", inspect.cleandoc(kind.__doc__ or ""), _option_table(kind)]
    return "\n\n".join(parts) + "\n"


def config_page(title: str, introduction: str, root: type[pydantic.BaseModel]) -> str:
    """Every key of a file, section by section."""
    places = models(root)
    parts, section = [f"# {title}", introduction], ""
    for model, paths in places.items():
        if (first := paths[0].partition(".")[0]) != section:
            parts.append(f"## {first}")
            section = first
        if model is not root:
            parts.append(f"### {_title(model, paths[0])} {{#{_anchor(model)}}}")
        parts.append(inspect.cleandoc(model.__doc__) if "__doc__" in vars(model) and model.__doc__ else "")
        if paths[1:]:
            parts.append("Also at " + ", ".join(f"`{path}`" for path in paths[1:]) + ".")
        parts.append(_key_table(model))
    return "\n\n".join(part for part in parts if part) + "\n"


def models(root: type[pydantic.BaseModel]) -> dict[type[pydantic.BaseModel], list[str]]:
    """Every section of a file -> the paths that it may stand at, outermost first."""
    found: dict[type[pydantic.BaseModel], list[str]] = {root: [""]}

    def visit(model: type[pydantic.BaseModel], path: str) -> None:
        for name, field in model.model_fields.items():
            inner = f"{path}.{field.alias or name}".lstrip(".")
            for nested in _models_of(field.annotation):
                is_new = nested not in found
                places = found.setdefault(nested, [])
                if inner not in places:
                    places.append(inner)
                if is_new:
                    visit(nested, inner)

    visit(root, "")
    return found


def comments(kind: type) -> dict[str, str]:
    """Field -> the comment beside it (or above it), of the most derived class that has one."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("vla_rlaif"):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        beside = {
            t.start[0]: (t.string.lstrip("# "), t.line.lstrip().startswith("#"))
            for t in tokens
            if t.type == tokenize.COMMENT
        }
        for node in ast.parse(source).body[0].body:  # pyright: ignore[reportAttributeAccessIssue]
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            text = " ".join(beside[line][0] for line in lines if line in beside)
            above = node.lineno - 1
            while not text and above in beside and beside[above][1]:
                above -= 1
            text = text or " ".join(beside[line][0] for line in range(above + 1, node.lineno))
            if text:
                found[node.target.id] = text
    return found


def _key_table(model: type[pydantic.BaseModel]) -> str:
    notes = comments(model)
    rows = []
    for name, field in model.model_fields.items():
        what = _describe(field.annotation, field.metadata)
        rows.append((f"`{field.alias or name}`", what, _key_default(field), notes.get(name, "")))
    return _table(("key", "type", "default", "meaning"), rows)


def _key_default(field: FieldInfo) -> str:
    if field.default is not PydanticUndefined:
        return _value(field.default)
    if field.default_factory is None:
        return NO_DEFAULT
    return _value(field.default_factory())  # pyright: ignore[reportCallIssue]


def _option_table(kind: type) -> str:
    rows = [
        (f"`{name}`", _describe(annotation, ()), default, note) for name, annotation, default, note in options(kind)
    ]
    return _table(("option", "type", "default", "meaning"), rows) if rows else ""


def options(kind: type) -> Iterator[tuple[str, Any, str, str]]:
    """Arguments and flags of a verb: name as it is typed, type, default, meaning."""
    notes, hints = comments(kind), typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        marks = list(_marks(hints[field.name]))
        named = [mark.name for mark in marks if "_ArgConf" in type(mark).__name__ and mark.name is not None]
        helps = [mark.help for mark in marks if "_ArgConf" in type(mark).__name__ and mark.help is not None]
        plain = _without_marks(hints[field.name])
        if named == [""] and dataclasses.is_dataclass(plain):
            yield from options(typing.cast(type, plain))
            continue
        name = (named[0] if named else field.name).replace("_", "-")
        is_positional = any("POSITIONAL" in str(mark).upper() for mark in marks)
        shown = name.upper() if is_positional else f"--{name}"
        if field.default is not dataclasses.MISSING:
            default = _value(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = _value(field.default_factory())
        else:
            default = NO_DEFAULT
        yield shown, plain, default, " ".join([*helps, notes.get(field.name, "")]).strip()


def _marks(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from get_args(annotation)[1:]
        yield from _marks(get_args(annotation)[0])


def _without_marks(annotation: Any) -> Any:
    return _without_marks(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def _describe(annotation: Any, metadata: Any) -> str:
    """A type in words."""
    written = [PARSED[m.func.__name__] for m in metadata if isinstance(m, pydantic.BeforeValidator)]
    if written:
        return written[0]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [m for mark in arguments[1:] for m in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
        return _describe(arguments[0], [*inner, *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(a, metadata if a is not type(None) else ()) for a in arguments)
    bounds = [f"{BOUNDS[type(m)]} {dataclasses.astuple(m)[0]}" for m in metadata if type(m) in BOUNDS]
    return ", ".join([_name(annotation, origin, arguments), *bounds])


def _name(annotation: Any, origin: Any, arguments: tuple[Any, ...]) -> str:
    if annotation is type(None):
        return "null"
    if origin is Literal:
        return " or ".join(f"`{_plain(a)}`" for a in arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return f"list of {_describe(arguments[0], ())}"
    if origin in (tuple, list):
        return "list of " + ", ".join(_describe(a, ()) for a in arguments)
    if origin is not None and issubclass(origin, Mapping):
        return f"mapping of {_describe(arguments[0], ())} to {_describe(arguments[1], ())}"
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return f"[{_tag(annotation) or 'section'}](#{_anchor(annotation)})"
    return PLAIN.get(annotation, f"`{annotation.__name__}`")


def _value(value: Any) -> str:
    """A default as it would be written in the file."""
    if isinstance(value, pydantic.BaseModel):
        tag = _tag(type(value))
        changed = [f"{k}: {_plain(getattr(value, k))}" for k in sorted(value.model_fields_set - {"type"})]
        return (
            f"`{{{', '.join([*([f'type: {tag}'] if tag else []), *changed])}}}`" if tag or changed else "its defaults"
        )
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(_plain(v) for v in value)}]"
    if isinstance(value, str):
        return value.replace("\n", "\\n") or '""'
    return str(value)


def _tag(model: type[pydantic.BaseModel]) -> str | None:
    field = model.model_fields.get("type")
    return None if field is None else str(field.default)


def _title(model: type[pydantic.BaseModel], path: str) -> str:
    tag = _tag(model)
    return f"{path}, type {tag}" if tag else path


def _anchor(model: type[pydantic.BaseModel]) -> str:
    return model.__name__.lower()


def _models_of(annotation: Any) -> list[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_of(argument)]


def _cell(text: str) -> str:
    """Neither a column's end nor HTML."""
    return text.replace("|", "\\|") if text.startswith(("`", "[")) else text.replace("|", "\\|").replace("<", "&lt;")


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [columns, ("---",) * len(columns), *(tuple(_cell(text) for text in row) for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
