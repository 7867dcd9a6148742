"""The client against a server that does what servers do: every way in which answers have been seen to go wrong."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judge_server import HONEST, MODEL, Behaviour, JudgeServer, Reply, clips, completion, constrained
from synthetic import SPEC, make_episodes

from vla_rlaif.interfaces import DetailedLabeller, Labeller
from vla_rlaif.labeller_config import OpenAIConfig
from vla_rlaif.preferences.asking import Asker
from vla_rlaif.preferences.judge import VLMJudge
from vla_rlaif.preferences.judge_openai import OpenAIModel, read_answer
from vla_rlaif.preferences.questions import JudgeFault, Question, VisionLanguageModel

PAIRS = np.array([[0, 1], [2, 3], [4, 5], [6, 7]])


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    yield server
    server.close()


def config(server: JudgeServer, **changes: Any) -> OpenAIConfig:
    values = {"url": server.url, "model": MODEL, "retries": 2, "retry_s": 0.01, "request_s": 5.0, "first_s": 5.0}
    return OpenAIConfig(**values | changes)


def make_judge(server: JudgeServer, cache: Path, *, invalid_budget: int = 0, **changes: Any) -> VLMJudge:
    model = OpenAIModel(config(server, **changes))
    return VLMJudge(Asker(model, cache=cache / "judge.sqlite", invalid_budget=invalid_budget), num_frames=2)


def after_probe(behaviour: Behaviour) -> Behaviour:
    """Honest for the probe's four questions: one for each label, and one about images."""
    return lambda body, number: HONEST(body, number) if number < 4 else behaviour(body, number)


def test_answers_come_from_the_frames_in_both_orders(server: JudgeServer, tmp_path: Path) -> None:
    judge = make_judge(server, tmp_path)
    assert isinstance(judge, Labeller) and isinstance(judge, DetailedLabeller)
    episodes = make_episodes(8)
    found = judge.answers(episodes, PAIRS, 0)
    last = episodes.images["top"][:, -1].astype(float).mean(axis=(1, 2, 3))
    p = 1 / (1 + np.exp(-(last[PAIRS[:, 0]] - last[PAIRS[:, 1]]) / 20))
    # P(A) + P(C) / 2 = 0.9 p + 0.05, and the other way round with 1 - p: their mean is 0.9 p + 0.05 again.
    np.testing.assert_allclose(found.p_first, 0.9 * p + 0.05, atol=1e-9)
    assert found.both_orders is not None
    np.testing.assert_allclose(found.both_orders, np.stack([0.9 * p + 0.05, 0.95 - 0.9 * p], axis=1), atol=1e-9)
    assert (found.num_asked, found.num_invalid) == (8, 0)


def test_what_is_sent(server: JudgeServer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    episodes = make_episodes(8, length=np.array([4, 2, 4, 4, 4, 4, 4, 4]))
    make_judge(server, tmp_path, api_key_file=key).label(episodes, PAIRS[:1], 0)
    assert len(server.requests) == 4 + 2
    body = server.requests[4]
    assert body["structured_outputs"] == {"choice": ["A", "B", "C"]}
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"], body["model"]) == (1, True, 20, MODEL)
    content = body["messages"][0]["content"]
    assert [part["type"] for part in content] == ["text", *["image_url"] * 2, "text", *["image_url"] * 2, "text"]
    assert content[0]["text"].startswith("A robot tried") and "reach the red cube" in content[0]["text"]
    assert "uuid" not in json.dumps(server.requests)  # one that is used twice is answered by the older image
    shown = clips(body)
    first, second = (0, 1) if np.array_equal(shown[0][0], episodes.images["top"][0, 0]) else (1, 0)
    lengths = {0: 4, 1: 2}
    for row, images in zip((first, second), shown, strict=True):  # the first frame and the last live one, bit by bit
        np.testing.assert_array_equal(images, episodes.images["top"][row, [0, lengths[row]]])
    assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)


def test_a_server_that_always_says_first(server: JudgeServer, tmp_path: Path) -> None:
    server.behaviour = constrained(lambda labels, shown: [0.83, 0.12, 0.05])
    found = make_judge(server, tmp_path).answers(make_episodes(8), PAIRS, 0)
    assert found.p_first.tolist() == [0.5] * 4
    assert found.both_orders is not None and (found.both_orders > 0.5).all()


def test_the_same_question_is_asked_once(server: JudgeServer, tmp_path: Path) -> None:
    episodes = make_episodes(8)
    judge = make_judge(server, tmp_path)
    first = judge.answers(episodes, np.concatenate([PAIRS, PAIRS[:, ::-1]]), 0)
    assert len(server.requests) == 4 + 8  # the probe, and two orders of four pairs
    np.testing.assert_allclose(first.p_first[:4], 1 - first.p_first[4:])
    again = make_judge(server, tmp_path).answers(episodes, PAIRS, 1)  # another process, as it were
    assert len(server.requests) == 12 and again.num_asked == 0
    np.testing.assert_array_equal(again.p_first, first.p_first[:4])
    make_judge(server, tmp_path, revision="new").label(episodes, PAIRS, 0)
    assert len(server.requests) == 24


def test_invalid_episodes_are_not_asked_about(server: JudgeServer, tmp_path: Path) -> None:
    valid = np.array([True, False, True, True, True, True, True, True])
    found = make_judge(server, tmp_path).answers(make_episodes(8, valid=valid), PAIRS, 0)
    assert np.isnan(found.p_first).tolist() == [True, False, False, False]
    assert found.num_asked == 6


def test_another_model_than_asked_for(server: JudgeServer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"serves small-vlm, not backend.model 'large-vlm'"):
        make_judge(server, tmp_path, model="large-vlm").probe(SPEC)


def test_no_openai_server_at_all(server: JudgeServer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"backend.url is 'localhost:8000'"):
        make_judge(server, tmp_path, url="localhost:8000")
    server.served = [{"not": "a name"}]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"no list of models: backend.url must name"):
        make_judge(server, tmp_path).probe(SPEC)


@pytest.mark.parametrize(
    "behaviour",
    [
        lambda body, number: completion({"I": 0.7, "A": 0.2, "B": 0.06, "C": 0.04}),  # guided_choice, in new versions
        lambda body, number: completion({"A": 0.6, "The": 0.4, "B": 0.0, "C": 0.0}),  # says a label, by chance
        lambda body, number: completion({"A": 1.0, "B": 0.0, "C": 0.0}),  # is sure of A, so that it even passes once
    ],
)
def test_unconstrained_answers_are_refused_at_the_start(
    server: JudgeServer, tmp_path: Path, behaviour: Behaviour
) -> None:
    server.behaviour = behaviour
    with pytest.raises(ValueError, match=r"does not constrain answers, or '[ABC]' is not a single token"):
        make_judge(server, tmp_path).label(make_episodes(8), PAIRS, 0)
    assert not any(part["type"] == "image_url" for r in server.requests for part in r["messages"][0]["content"])


def test_spaces_of_a_tokenizer_belong_to_no_answer() -> None:
    """As vLLM answers for a tokenizer that joins words by spaces. Two ways to write one label count together."""
    answer = read_answer(completion({" A": 0.6, " B": 0.3, "B": 0.1}).body, MODEL, ("A", "B"))
    assert answer.probabilities is not None
    np.testing.assert_allclose(answer.probabilities, [0.6, 0.4])


def test_labels_of_several_tokens_are_refused_at_the_start(server: JudgeServer) -> None:
    """`tie` is written t-ie: the first token is all that one token can say."""
    server.behaviour = lambda body, number: completion({"t": 1.0, "tie": 0.0}, said="t")
    model = OpenAIModel(config(server))
    assert isinstance(model, VisionLanguageModel)
    with pytest.raises(ValueError, match="'tie' is not a single token"):
        model.probe(Question(parts=("?",), labels=("tie", "no")))


def test_too_many_images_are_refused_at_the_start(server: JudgeServer, tmp_path: Path) -> None:
    def two_at_most(body: dict[str, Any], number: int) -> Reply:
        if sum(part["type"] == "image_url" for part in body["messages"][0]["content"]) > 2:
            return Reply(b'{"error": {"message": "At most 2 image(s) may be provided in one prompt."}}', 400)
        return HONEST(body, number)

    server.behaviour = two_at_most
    with pytest.raises(ValueError, match=r"refuses a question with 4 images .*At most 2.*--limit-mm-per-prompt"):
        make_judge(server, tmp_path).probe(SPEC)
    assert len(server.requests) == 4  # not asked again


TRUNCATED = completion({"A": 0.5, "B": 0.4, "C": 0.1}).body[:-40]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(TRUNCATED), "no chat completion .*Invalid JSON: EOF"),
        (Reply(b'{"choices": "none"}'), "no chat completion"),
        (Reply(b"<html>busy</html>"), "no chat completion"),
        (Reply(b""), "no chat completion"),
        (completion({"A": 0.5, "B": 0.4, "C": 0.1}, finish="content_filter"), "finished by 'content_filter'"),
        (completion({"A": 0.5, "B": 0.4, "C": 0.1}, said="Both"), "'Both', .*where one of A, B, C was wanted"),
        (completion({"A": 0.5, "B": 0.4, "C": 0.0}), "probability 0.9 together"),
        (completion({"A": 0.5, "B": 0.5}), "no log-probability of C, only of B, A"),
        (completion({"A": 1.0, "B": 1.0, "C": 1.0}), "probability 3 together"),
    ],
)
def test_answers_that_are_none(server: JudgeServer, tmp_path: Path, reply: Reply, message: str) -> None:
    """They skip their pair, are not asked again at once, and past the budget end the run with the last reason."""
    server.behaviour = after_probe(lambda body, number: reply if number < 6 else HONEST(body, number))
    judge = make_judge(server, tmp_path, invalid_budget=2, concurrency=1)
    found = judge.answers(make_episodes(8), PAIRS, 0)
    assert (found.num_asked, found.num_invalid, int(np.isnan(found.p_first).sum())) == (8, 2, 2)
    assert len(server.requests) == 4 + 8
    with pytest.raises(JudgeFault, match=f"3 of 9 answers .* more than invalid_budget 2.*{message}"):
        server.behaviour = lambda body, number: reply
        judge.label(make_episodes(8), PAIRS, 0)  # the two pairs without an answer are asked again


def test_busy_servers_are_asked_again(server: JudgeServer, tmp_path: Path) -> None:
    def busy(body: dict[str, Any], number: int) -> Reply:
        match number:
            case 5:
                return Reply(b"slow down", 429, {"Retry-After": "0"})
            case 6:
                return Reply(b"oops", 503)
            case 8:
                return Reply(b'{"half": ', length=5000)  # the connection closes before the end
        return HONEST(body, number)

    server.behaviour = busy
    found = make_judge(server, tmp_path, concurrency=1).answers(make_episodes(8), PAIRS, 0)
    assert (found.num_asked, found.num_invalid) == (8, 0) and not np.isnan(found.p_first).any()
    assert len(server.requests) == 4 + 8 + 3


def test_a_server_that_stays_busy(server: JudgeServer, tmp_path: Path) -> None:
    server.behaviour = after_probe(lambda body, number: Reply(b"queue full", 429))
    with pytest.raises(JudgeFault, match="failed in 3 tries, the last time because status 429: queue full"):
        make_judge(server, tmp_path, concurrency=1).label(make_episodes(8), PAIRS, 0)


def test_a_request_that_is_wrong_is_not_sent_again(server: JudgeServer, tmp_path: Path) -> None:
    server.behaviour = after_probe(lambda body, number: Reply(b"prompt too long", 400))
    with pytest.raises(ValueError, match=r"status 400\): prompt too long"):
        make_judge(server, tmp_path, concurrency=1).label(make_episodes(8), PAIRS, 0)
    asked = [json.dumps(body) for body in server.requests[4:]]
    assert len(set(asked)) == len(asked) <= 2  # the next one may be on its way already


def test_a_slow_first_answer_is_waited_for_and_no_other(server: JudgeServer, tmp_path: Path) -> None:
    def slow(body: dict[str, Any], number: int) -> Reply:
        reply = HONEST(body, number)
        reply.delay_s = 0.5 if number in (0, 4, 5, 6) else 0.0
        return reply

    server.behaviour = slow
    judge = make_judge(server, tmp_path, request_s=0.15, first_s=10.0, concurrency=1)
    judge.probe(SPEC)
    with pytest.raises(JudgeFault, match=r"in 3 tries, the last time because it took longer than 0.15 s"):
        judge.label(make_episodes(8), PAIRS, 0)


def test_a_server_that_is_down(server: JudgeServer, tmp_path: Path) -> None:
    with socket.socket() as nobody:  # bound, and never listening
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        with pytest.raises(JudgeFault, match=r"GET .*/v1/models failed in 3 tries.*refused.*Is the server up"):
            make_judge(server, tmp_path, url=url).probe(SPEC)


def test_a_server_that_dies_loses_no_answer(server: JudgeServer, tmp_path: Path) -> None:
    server.behaviour = lambda body, number: HONEST(body, number) if number < 9 else Reply(b"gone", 502)
    with pytest.raises(JudgeFault, match="in the cache: just start again"):
        make_judge(server, tmp_path, concurrency=1).label(make_episodes(8), PAIRS, 0)
    server.behaviour = HONEST
    assert make_judge(server, tmp_path).answers(make_episodes(8), PAIRS, 0).num_asked == 8 - 5


def test_a_server_that_was_replaced(server: JudgeServer, tmp_path: Path) -> None:
    other = completion({"A": 0.5, "B": 0.4, "C": 0.1}, model="tiny-vlm")
    server.behaviour = after_probe(lambda body, number: other)
    with pytest.raises(JudgeFault, match="'tiny-vlm' has answered in place of 'small-vlm'"):
        make_judge(server, tmp_path, invalid_budget=99).label(make_episodes(8), PAIRS, 0)


def test_as_many_requests_at_a_time_as_allowed(server: JudgeServer, tmp_path: Path) -> None:
    def delayed(body: dict[str, Any], number: int) -> Reply:
        reply = HONEST(body, number)
        reply.delay_s = 0.05
        return reply

    server.behaviour = delayed
    pairs = np.array([(a, b) for a in range(6) for b in range(a + 1, 6)])
    make_judge(server, tmp_path, concurrency=3).label(make_episodes(6, group_size=6), pairs, 0)
    assert server.most_at_once == 3


def test_a_key_file_that_is_none(server: JudgeServer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"api_key_file: .*nowhere is no readable file"):
        make_judge(server, tmp_path, api_key_file=tmp_path / "nowhere")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="no readable file with a key"):
        make_judge(server, tmp_path, api_key_file=tmp_path / "empty")


def test_a_cache_that_is_none(server: JudgeServer, tmp_path: Path) -> None:
    (tmp_path / "judge.sqlite").write_bytes(b"this is no database, only text that is long enough" * 100)
    with pytest.raises(ValueError, match=r"not a readable judge cache .*: delete it"):
        make_judge(server, tmp_path).label(make_episodes(8), PAIRS, 0)
