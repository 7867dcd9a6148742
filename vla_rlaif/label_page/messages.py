"""What page and server say to each other over the websocket, as JSON.

The page says join, answer, undo and alive. The server says ``state`` (the question, the progress, who is there) and
``refused`` with a reason.
"""

from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from vla_rlaif.label_page import opinions
from vla_rlaif.label_page.catalogue import Shown
from vla_rlaif.label_page.clips import ClipCache
from vla_rlaif.label_page.desk import LabelDesk, Question
from vla_rlaif.label_page.queue import Pair
from vla_rlaif.local_page.sheets import columns_of

MAX_BYTES = 4096  # of a message from the page
ANSWERS: dict[str, float | None] = {"left": 1.0, "right": 0.0, "tie": 0.5, "skip": None}
_Id = Annotated[str, Field(max_length=200)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Join(_Message):
    """Who is labelling."""

    type: Literal["join"]
    name: Annotated[str, Field(max_length=200)]


class Answer(_Message):
    """Which clip is better, of the pair as it was shown."""

    type: Literal["answer"]
    left: _Id
    right: _Id
    answer: Literal["left", "right", "tie", "skip"]


class Undo(_Message):
    """Take back the newest answer."""

    type: Literal["undo"]


class Alive(_Message):
    """Somebody is looking at the page."""

    type: Literal["alive"]


Message = Join | Answer | Undo | Alive
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def read_message(data: str | bytes) -> Message:
    """Raises ValueError for anything else than a message of the page."""
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        what = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in what["loc"])
        raise ValueError(f"not a message of this page: {where or 'the text'}: {what['msg']}") from None


def say_question(question: Question | None, clips: ClipCache) -> dict[str, Any] | None:
    """A question for the page; None if there is none."""
    if question is None:
        return None
    reopened = {name for name, p_first in ANSWERS.items() if p_first == question.previous}
    return {
        **say_pair(question.pair, clips),
        "reopened": question.is_reopened,
        "previous": next(iter(reopened)) if question.is_reopened else None,
    }


def say_pair(pair: Pair, clips: ClipCache) -> dict[str, Any]:
    return {"left": _side(pair.first, clips), "right": _side(pair.second, clips)}


def say_progress(desk: LabelDesk, name: str) -> dict[str, Any]:
    """The figures that a person sees."""
    progress, person = desk.progress(), desk.people[name]
    return {
        "done": progress.done,
        "wanted": progress.wanted,
        "repeats": progress.repeats,
        "mine": person.counts(),
        "can_undo": person.newest() is not None,
        "with_self": opinions.with_self(desk, name),
        "with_others": opinions.with_others(desk, name),
        "alpha": opinions.alpha(desk),
    }


def _side(name: str, clips: ClipCache) -> dict[str, Any]:
    shown = clips.shown(name)
    assert isinstance(shown, Shown), "a pair is of episodes in the catalogue"
    return {
        "id": name,
        "instruction": shown.instruction,
        "frames": shown.num_frames,
        "columns": columns_of(shown.num_frames),
        "cameras": [
            {"name": camera, "url": f"clip/{quote(name, safe='')}/{quote(camera, safe='')}", "height": h, "width": w}
            for camera, (h, w) in shown.sizes.items()
        ],
    }
