"""The judge behind a real vLLM server on the CPU; opt-in, because vLLM has an environment of its own.

`make test-vllm` builds that and runs these, with VLLM_PYTHON=.venv-vllm/bin/python.
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import SPEC, make_episodes
from test_judge import scaled

from vla_rlaif.labeller_config import OpenAIConfig, TransformersConfig
from vla_rlaif.preferences.asking import Asker
from vla_rlaif.preferences.judge import VLMJudge
from vla_rlaif.preferences.judge_openai import OpenAIModel, read_answer, request
from vla_rlaif.preferences.judge_transformers import TransformersModel
from vla_rlaif.preferences.questions import Question, VisionLanguageModel
from vla_rlaif.preferences.rubric import Rater

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON names no interpreter that has vLLM")
START_S = 900.0
PAIRS = np.array([[0, 1], [2, 3], [4, 5], [6, 7]])
TOLERANCE = 1e-4  # of a probability, float32 on both sides


def serve(folder: Path, log: Path, name: str) -> Iterator[str]:
    """The URL of a server as docs/labels.md starts it, with what a machine without a GPU needs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert PYTHON is not None
    command = [
        *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", name),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "8"),
        *("--limit-mm-per-prompt", json.dumps({"image": 4}), "--generation-config", "vllm"),
        *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(2**27)),
        *("--chat-template-content-format", "openai"),
    ]
    ours = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTHON"))}
    quick = {"TORCH_COMPILE_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=ours | quick, cwd=log.parent)
    try:
        deadline = time.monotonic() + START_S
        while not is_up(port):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def is_up(port: int) -> bool:
    with closing(HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def folder(judge_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scaled(judge_folder, tmp_path_factory.mktemp("vllm") / "decided", blind=False)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    yield from serve(folder, folder.parent / "server.log", "tiny-judge")


def client(url: str, **changes: Any) -> OpenAIModel:
    return OpenAIModel(OpenAIConfig(**{"url": url, "model": "tiny-judge", "request_s": 120.0} | changes))


def judge(model: VisionLanguageModel, cache: Path, **changes: Any) -> VLMJudge:
    asker = Asker(model, cache=cache / f"{len(list(cache.iterdir()))}.sqlite", invalid_budget=0)
    settings: dict[str, Any] = {"num_frames": 2} | changes
    return VLMJudge(asker, **settings)


def test_the_same_answers_as_in_process(url: str, folder: Path, tmp_path: Path) -> None:
    episodes = make_episodes(8)
    served = judge(client(url), tmp_path)
    served.probe(SPEC)
    begun = time.perf_counter()
    there = served.answers(episodes, PAIRS, 0)
    print(f"{(time.perf_counter() - begun) / 8 * 1e3:.0f} ms a question of four images")
    here = judge(TransformersModel(TransformersConfig(folder=folder)), tmp_path).answers(episodes, PAIRS, 0)
    assert there.both_orders is not None and here.both_orders is not None
    print(f"largest difference of a probability {np.abs(there.both_orders - here.both_orders).max():.1e}")
    np.testing.assert_allclose(there.both_orders, here.both_orders, atol=TOLERANCE)
    assert there.both_orders.std() > 1e-3
    assert judge(client(url), tmp_path, ties=False).answers(episodes, PAIRS, 0).num_invalid == 0


def test_ratings(url: str, folder: Path, tmp_path: Path) -> None:
    episodes = make_episodes(8)
    asked = [client(url), TransformersModel(TransformersConfig(folder=folder))]
    there, here = (
        Rater(Asker(model, cache=tmp_path / f"{i}.sqlite", invalid_budget=0), num_frames=2).scores(episodes)
        for i, model in enumerate(asked)
    )
    np.testing.assert_allclose(there, here, atol=TOLERANCE)


def test_what_the_probe_refuses(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"serves tiny-judge, not backend.model 'large'"):
        client(url, model="large").probe(Question(parts=("?",), labels=("A", "B")))
    with pytest.raises(ValueError, match="is not a single token"):
        client(url).probe(Question(parts=("?",), labels=("better clip", "the other")))
    with pytest.raises(ValueError, match=r"refuses a question with 6 images \(status 400\)"):
        judge(client(url), tmp_path, num_frames=3).probe(SPEC)


@pytest.mark.parametrize("field", ["guided_choice", "structured_output", "response_format_choice"])
def test_unknown_fields_are_ignored_and_noticed(url: str, field: str) -> None:
    """The server answers them with status 200 as if nothing were asked; ``read_answer`` sees it."""
    question = Question(parts=("Reply with the word purple.",), labels=("A", "B"))
    body = request("tiny-judge", question)
    body[field] = body.pop("structured_outputs")["choice"]
    with closing(HTTPConnection(url.split("/")[2], timeout=60)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200
        assert read_answer(reply.read(), "tiny-judge", question.labels).probabilities is None


def test_many_questions_at_once_are_not_confused(url: str, folder: Path, tmp_path: Path) -> None:
    episodes = make_episodes(12, group_size=12)
    pairs = np.array([(a, b) for a in range(12) for b in range(a + 1, 12)])
    there = judge(client(url, concurrency=16), tmp_path).answers(episodes, pairs, 0)
    here = judge(TransformersModel(TransformersConfig(folder=folder)), tmp_path).answers(episodes, pairs, 0)
    np.testing.assert_allclose(there.p_first, here.p_first, atol=TOLERANCE)


def test_a_blind_judge_is_indifferent(judge_folder: Path, tmp_path: Path) -> None:
    blind = scaled(judge_folder, tmp_path / "blind", blind=True)
    for url in serve(blind, tmp_path / "server.log", "blind"):
        asked = judge(client(url, model="blind"), tmp_path, ties=False)
        found = asked.answers(make_episodes(8), PAIRS, 0)
        assert found.p_first.tolist() == [0.5] * 4
        assert found.both_orders is not None and abs(found.both_orders[0, 0] - 0.5) > 0.01
