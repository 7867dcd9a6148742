"""The client of Robometer's server, against a real HTTP server: what is sent and read, and everything that breaks."""

import json
import math
from typing import Any

import numpy as np
import pytest
from robometer_server import MODEL, Reply, RobometerServer, answer, honest, progress
from synthetic import SPEC, make_episodes

from vla_rlaif.interfaces import RewardModel
from vla_rlaif.preferences.questions import JudgeFault
from vla_rlaif.reward_models.robometer import RobometerReward
from vla_rlaif.reward_terms_config import RobometerRewardConfig


@pytest.fixture
def server():
    server = RobometerServer()
    yield server
    server.close()


def reward(server: RobometerServer, **settings: Any) -> RobometerReward:
    quick = {"retries": 1, "retry_s": 0.01, "request_s": 5.0, "first_s": 5.0, "frames": 3, "batch": 4}
    return RobometerReward(RobometerRewardConfig.model_validate({"url": server.url, **quick, **settings}))


def test_the_score_is_that_of_the_last_live_frame(server):
    """Frames of 3 evenly spaced ones: of 4 decisions 0 2 4, of 1 decision 0 0 1 (linspace(0, 1, 3) rounds half to
    even)."""
    length = np.array([4, 1, 2, 4, 4, 3])
    valid = np.array([True, True, True, False, True, True])
    episodes, model = make_episodes(6, length=length, valid=valid), reward(server)
    assert isinstance(model, RewardModel) and model.version == 0 and not model.privileged
    model.probe(SPEC)
    score = model.score(episodes)
    wanted = episodes.images["top"][np.arange(6), length].mean(axis=(1, 2, 3)) / 255
    np.testing.assert_allclose(score, np.where(valid, wanted, np.nan), rtol=1e-6)
    sent = [sample for samples in server.requests[1:] for sample in samples]
    by_task = {(s["trajectory"]["task"], s["trajectory"]["frames"].tobytes()) for s in sent}
    frames = {0: [0, 2, 4], 1: [0, 0, 1], 2: [0, 1, 2], 4: [0, 2, 4], 5: [0, 2, 3]}
    assert by_task == {(episodes.instruction[r], episodes.images["top"][r, f].tobytes()) for r, f in frames.items()}
    assert sorted(len(samples) for samples in server.requests) == [1, 1, 4]
    assert all(s["sample_type"] == "progress" for s in sent)


def test_the_success_head_and_values_outside_of_the_range(server):
    episodes = make_episodes(4)
    np.testing.assert_allclose(
        reward(server, score="success").score(episodes), 1 - reward(server).score(episodes), rtol=1e-5
    )
    server.behaviour = lambda samples, number: answer([[0.1, 0.2, 1.3], [0, 0, -0.2], [0.5], [0, 1]])
    np.testing.assert_allclose(reward(server).score(episodes), [1, 0, 0.5, 1])


def test_an_unusable_answer_is_nan_and_a_budget_of_them_ends_the_run(server):
    odd: list[Any] = [[0.1, 0.2, None], [], "x", [0.1, 0.2, 0.3]]
    server.behaviour = lambda samples, number: answer(odd)
    model = reward(server, invalid_budget=6)
    np.testing.assert_allclose(model.score(make_episodes(4)), [math.nan, math.nan, math.nan, 0.3], rtol=1e-6)
    model.score(make_episodes(4))
    assert model.num_invalid == 6
    with pytest.raises(
        JudgeFault, match=r"9 unusable answers, reward.invalid_budget is 6; the last one: progress_pred"
    ):
        model.score(make_episodes(4))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"outputs_progress": {"progress_pred": [[0.1,', "JSONDecodeError"),
        (b"<html>", "JSONDecodeError"),
        (b'{"outputs_progress": null}', "TypeError"),
        (b'{"error": "CUDA out of memory"}', "KeyError"),
        (b'{"outputs_progress": {"progress_pred": [[0.1, 0.2, 0.3]]}}', "1 entries for 4 samples"),
        (b'{"outputs_progress": {"progress_pred": 3}}', "3 entries for 4 samples"),
        (json.dumps({"outputs_progress": {"progress_pred": [[math.nan] * 3] * 4}}).encode(), "which is no number"),
    ],
)
def test_malformed_answers(server, body, said):
    server.behaviour = lambda samples, number: Reply(body)
    model = reward(server, invalid_budget=4)
    assert np.isnan(model.score(make_episodes(4))).all()
    with pytest.raises(JudgeFault, match=said):
        model.score(make_episodes(4))
    with pytest.raises(ValueError, match="does not answer as Robometer's evaluation server does"):
        server.behaviour = lambda samples, number: Reply(body.replace(b"[[0.1, 0.2, 0.3]]", b"[]"))
        model.probe(SPEC)


def test_server_errors_are_asked_again_and_the_last_one_is_said(server):
    server.behaviour = lambda samples, number: Reply(b"busy", 503) if number == 0 else honest(samples, number)
    assert np.isfinite(reward(server).score(make_episodes(4))).all() and len(server.requests) == 2
    server.behaviour = lambda samples, number: Reply(b"CUDA out of memory", 500)
    with pytest.raises(
        JudgeFault, match=r"failed in 2 tries.*CUDA out of memory.*is reward.url right\? The run goes on"
    ):
        reward(server).score(make_episodes(4))


def test_too_many_images_are_refused_with_the_servers_words(server):
    server.behaviour = lambda samples, number: Reply(b"Part exceeded maximum size", 413)
    with pytest.raises(ValueError, match=r"refuses 4 clips of 3 frames \(status 413\): Part exceeded.*reward.batch"):
        reward(server).score(make_episodes(4))


def test_a_slow_server_and_an_answer_that_is_cut_short(server):
    server.behaviour = lambda samples, number: Reply(b"{}", delay_s=1.0)
    with pytest.raises(JudgeFault, match=r"it took longer than 0.1 s"):
        reward(server, retries=0, first_s=0.1).score(make_episodes(4))
    server.behaviour = lambda samples, number: Reply(b"{}", length=100)
    with pytest.raises(JudgeFault, match="failed in 2 tries"):
        reward(server, request_s=0.5, first_s=0.5).score(make_episodes(4))


def test_another_model_another_server_and_none(server):
    with pytest.raises(ValueError, match=f"serves '{MODEL}', not reward.model 'other'"):
        reward(server, model="other").probe(SPEC)
    model = reward(server, model=MODEL)
    model.probe(SPEC)
    server.model = "swapped"
    with pytest.raises(ValueError, match=r"serves 'swapped', not reward.model"):
        model.score(make_episodes(4))
    unnamed = reward(server)
    unnamed.probe(SPEC)
    server.model = "swapped again"
    with pytest.raises(JudgeFault, match="serves 'swapped again' now, not 'swapped': it was replaced"):
        unnamed.score(make_episodes(4))
    with pytest.raises(ValueError, match=r"/v1/model_info answers with status 404.*must be that of Robometer"):
        reward(server, url=f"{server.url}/v1").probe(SPEC)
    with pytest.raises(ValueError, match=r"reward.url is 'localhost:1'"):
        reward(server, url="localhost:1")
    server.close()
    with pytest.raises(JudgeFault, match="failed in 2 tries"):
        reward(server).probe(SPEC)


def test_an_unknown_camera_is_named(server):
    with pytest.raises(ValueError, match=r"reward.camera 'wrist' is none of \['top'\]"):
        reward(server, camera="wrist").score(make_episodes(4))


def test_the_server_of_these_tests_reads_what_it_is_sent():
    sample = {"trajectory": {"frames": np.full((2, 1, 1, 3), 51, np.uint8)}}
    assert progress(sample) == [0.2, 0.2]
