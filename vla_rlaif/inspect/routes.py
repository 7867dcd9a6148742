"""Addresses of the page, below its token, and what answers them. Knows no sockets.

""  page.css  js/NAME.js                     the page
api/NAME?run=...                             JSON
sheet?run=...&id=...&camera=...              a clip as one WebP picture
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vla_rlaif.inspect import answers, details
from vla_rlaif.inspect.library import Library
from vla_rlaif.inspect.run import Run

HERE = Path(__file__).parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
SHEET_AGE_S = 3600  # that a browser keeps a clip: an episode that was recorded does not change
MAX_COMPARED = 16


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: HTTPStatus
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    age_s: int = 0


class Query:
    """The part of an address behind the question mark."""

    def __init__(self, text: str) -> None:
        self._values = parse_qs(text, keep_blank_values=True, max_num_fields=20)

    def text(self, name: str, default: str | None = None) -> str:
        values = self._values.get(name)
        if values is None and default is None:
            raise ValueError(f"the address lacks {name}=")
        return values[0] if values is not None else str(default)

    def number(self, name: str, default: int) -> int:
        text = self.text(name, str(default))
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{name}={text} is no whole number") from None


class Routes:
    """``answer`` may be called from any thread."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._files = {
            str(path.relative_to(HERE)): (path.read_bytes(), f"{KINDS[path.suffix]}; charset=utf-8")
            for path in HERE.rglob("*.*")
            if path.suffix in KINDS
        }
        self._api: Mapping[str, Callable[[Query], dict[str, Any]]] = {
            "runs": lambda q: answers.list_entries(library),
            "run": lambda q: details.describe_source(self._source(q)),
            "stamp": lambda q: details.stamp(self._source(q)),
            "metrics": lambda q: details.describe_metrics(self._run(q), q.number("epoch", -1), q.number("first", 0)),
            "episodes": lambda q: answers.list_episodes(self._source(q), *_page(q)),
            "groups": lambda q: answers.list_groups(self._source(q), *_page(q)),
            "episode": lambda q: details.describe_episode(self._source(q), q.text("id")),
            "group": lambda q: details.describe_group(self._source(q), q.text("id")),
            "some": lambda q: details.describe_some(self._source(q), _some(q)),
            "preferences": lambda q: details.describe_preferences(
                self._run(q), q.number("offset", 0), q.text("only", "all")
            ),
            "card": lambda q: {"card": self._run(q).card},
            "pool": lambda q: details.describe_pool(library.entry(q.text("run")).path),
        }

    def answer(self, path: str) -> Answer:
        """``path`` is what follows the token, with the query."""
        address = urlsplit(path)
        name, query = address.path or "index.html", address.query
        if name in self._files:
            body, kind = self._files[name]
            return Answer(status=HTTPStatus.OK, body=body, kind=kind)
        try:
            if name == "sheet":
                q = Query(query)
                sheet = self._source(q).sheet(q.text("id"), q.text("camera"))
                return Answer(status=HTTPStatus.OK, body=sheet, kind="image/webp", age_s=SHEET_AGE_S)
            if name.startswith("api/") and name.removeprefix("api/") in self._api:
                said = self._api[name.removeprefix("api/")](Query(query))
                return _json(HTTPStatus.OK, said)
        except (ValueError, OSError) as error:  # of the reader's files, or of the address: the page says it
            return _json(HTTPStatus.OK, {"problem": str(error)})
        return Answer(status=HTTPStatus.NOT_FOUND, body=b"no such page\n")

    def _source(self, query: Query) -> Any:
        return self._library.source(query.text("run"))

    def _run(self, query: Query) -> Run:
        source = self._source(query)
        if not isinstance(source, Run):
            raise ValueError(f"{source.path} is a dataset; only a run has that.")
        return source


def _page(query: Query) -> tuple[str, str, int, int]:
    """Filter, order, offset, limit."""
    return query.text("filter", ""), query.text("order", "-step"), query.number("offset", 0), query.number("limit", 100)


def _some(query: Query) -> list[str]:
    names = query.text("ids").split(",")
    if len(names) > MAX_COMPARED:
        raise ValueError(f"{len(names)} episodes are too many to compare; choose {MAX_COMPARED} at most.")
    return names


def _json(status: HTTPStatus, said: Mapping[str, Any]) -> Answer:
    body = json.dumps(said, allow_nan=False, separators=(",", ":")).encode()
    return Answer(status=status, body=body, kind="application/json; charset=utf-8")
