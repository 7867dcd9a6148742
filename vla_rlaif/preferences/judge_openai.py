"""A vision-language model behind an OpenAI-compatible server that can constrain answers, such as vLLM.

One token is asked for, constrained to the labels, with log-probabilities. What is known to go wrong with servers
(unknown fields are ignored with status 200, answers are cut short, images are confused) is checked by ``probe`` before
the first question and by ``read_answer`` with every answer.
Axes: L labels.
"""

import base64
import io
import math
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from http import HTTPStatus
from typing import Any

from PIL import Image as Picture
from pydantic import BaseModel, ValidationError

from vla_rlaif.labeller_config import OpenAIConfig
from vla_rlaif.preferences.judge_http import Endpoint
from vla_rlaif.preferences.questions import Answer, Image, JudgeFault, Question, normalised

TOP_LOGPROBS = 20  # the most that servers give; all labels must be among them
WARNING = (
    "Answers must be constrained to the labels (`structured_outputs: {choice: ...}`, as vLLM's are) and come with "
    "log-probabilities; docs/labels.md has a start command that works."
)


class _Alternative(BaseModel):
    token: str
    logprob: float


class _Token(BaseModel):
    top_logprobs: list[_Alternative]


class _Logprobs(BaseModel):
    content: list[_Token]


class _Message(BaseModel):
    content: str


class _Choice(BaseModel):
    message: _Message
    finish_reason: str
    logprobs: _Logprobs


class _Completion(BaseModel):
    """Of an answer, what is used; a server may say more."""

    model: str
    choices: list[_Choice]


class _Served(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Served]


class OpenAIModel:
    """A client; requests run in threads, ``concurrency`` at a time."""

    def __init__(self, config: OpenAIConfig) -> None:
        self._config = config
        self._endpoint = Endpoint(
            config.url,
            api_key=_api_key(config),
            retries=config.retries,
            retry_s=config.retry_s,
            request_s=config.request_s,
            first_s=config.first_s,
        )

    @property
    def identity(self) -> str:
        return f"openai {self._config.model}@{self._config.revision or 'unknown revision'}"

    def probe(self, example: Question) -> None:
        """The model's name, one-token labels, a constraint that is honoured, and as many images as ``example`` has."""
        self._check_name()
        for label in example.labels:  # of one label to choose from, only a constrained answer is always that label
            lone = Question(parts=("Reply with the word purple and nothing else.",), labels=(label,))
            answer = self._ask(lone, threading.Event())
            if answer.probabilities is None:
                raise ValueError(
                    f"{self._endpoint.url}: model {self._config.model!r}, asked to choose from {label!r} alone: "
                    f"{answer.problem}. Either the server does not constrain answers, or {label!r} is not a single "
                    f"token of this model. {WARNING}"
                )
        answer = self._ask(example, threading.Event())
        if answer.probabilities is None:
            num = sum(not isinstance(part, str) for part in example.parts)
            raise ValueError(
                f"{self._endpoint.url}: model {self._config.model!r}, asked about {num} images: {answer.problem}. "
                f"{WARNING}"
            )

    def answer(self, questions: Sequence[Question]) -> Generator[tuple[int, Answer]]:
        give_up = threading.Event()
        with ThreadPoolExecutor(self._config.concurrency, thread_name_prefix="judge") as pool:
            rows = {pool.submit(self._ask, question, give_up): row for row, question in enumerate(questions)}
            try:
                for future in as_completed(rows):
                    yield rows[future], future.result()
            finally:  # what waits is given up, what is on its way is waited for
                give_up.set()
                pool.shutdown(wait=False, cancel_futures=True)

    def _check_name(self) -> None:
        reply = self._endpoint.get("/models")
        try:
            served = [model.id for model in _Models.model_validate_json(reply.body).data]
        except ValidationError:
            raise ValueError(
                f"{self._endpoint.url}/models answers with status {reply.status} and {reply.text!r}, which is no list "
                "of models: backend.url must name an OpenAI-compatible server up to its version, .../v1."
            ) from None
        if self._config.model not in served:
            raise ValueError(
                f"{self._endpoint.url} serves {', '.join(served) or 'nothing'}, not backend.model "
                f"{self._config.model!r}: start the server with that model (or --served-model-name) or name another."
            )

    def _ask(self, question: Question, give_up: threading.Event) -> Answer:
        reply = self._endpoint.post("/chat/completions", request(self._config.model, question), give_up)
        if reply.status != HTTPStatus.OK:
            num = sum(not isinstance(part, str) for part in question.parts)
            raise ValueError(
                f"{self._endpoint.url} refuses a question with {num} images (status {reply.status}): {reply.text}. "
                "If that is about their number or the length, ask for fewer frames or start the server with room for "
                "more (vLLM: --limit-mm-per-prompt, --max-model-len)."
            )
        return read_answer(reply.body, self._config.model, question.labels)


def request(model: str, question: Question) -> dict[str, Any]:
    """The body of one question. Images are sent whole and without an id: a server that is given ids may answer about
    an older image of the same id."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in question.parts
    ]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "structured_outputs": {"choice": list(question.labels)},
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": TOP_LOGPROBS,
    }


def read_answer(body: bytes, model: str, labels: Sequence[str]) -> Answer:
    """The answer in the body of a response of status 200, if it is one.

    Raises:
        JudgeFault: another model has answered.
    """
    try:
        completion = _Completion.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = body[:200].decode(errors="replace")
        return Answer(probabilities=None, problem=f"no chat completion ({where} {first['msg']}): {text!r}")
    if completion.model != model:
        raise JudgeFault(f"{completion.model!r} has answered in place of {model!r}: the server was replaced.")
    if not completion.choices or not completion.choices[0].logprobs.content:
        return Answer(probabilities=None, problem="an empty answer")
    choice = completion.choices[0]
    # Tokenizers that join words by spaces write " A" for A: the space is theirs, not the answer's.
    if choice.message.content.strip() not in labels or choice.finish_reason not in ("stop", "length"):
        said = f"{choice.message.content!r}, finished by {choice.finish_reason!r}"
        return Answer(probabilities=None, problem=f"{said}, where one of {', '.join(labels)} was wanted")
    tokens = {a.token: a.logprob for a in reversed(choice.logprobs.content[0].top_logprobs)}
    found: dict[str, float] = {}
    for token, logprob in tokens.items():
        found[token.strip()] = found.get(token.strip(), 0.0) + math.exp(min(logprob, 1.0))
    missing = [label for label in labels if label not in found]
    if missing:
        got = ", ".join(found)
        return Answer(probabilities=None, problem=f"no log-probability of {', '.join(missing)}, only of {got}")
    return normalised(labels, [found[label] for label in labels])


def data_url(image: Image) -> str:
    """The image as a PNG, bit by bit what it is here."""
    buffer = io.BytesIO()
    Picture.fromarray(image).save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _api_key(config: OpenAIConfig) -> str | None:
    if config.api_key_file is None:
        return None
    try:
        return config.api_key_file.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        raise ValueError(f"backend.api_key_file: {config.api_key_file} is no readable file with a key in it.") from None
