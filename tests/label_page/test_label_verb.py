"""`vla-rlaif label DATA --ui` as a process, and `reward.labeller.type: human` from a config."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from desks import desk_of, reply, sampled
from label_serving import make_folder
from synthetic import SPEC

from vla_rlaif.build_labeller import ProbedLabeller, build_labeller
from vla_rlaif.config import parse_config
from vla_rlaif.label_page.human import HumanLabeller
from vla_rlaif.label_page.settings import PageSettings
from vla_rlaif.label_page.verb import main
from vla_rlaif.preferences.store import PreferenceStore
from vla_rlaif.reward_config import PreferenceRewardConfig


def test_the_page_opens_and_ctrl_c_ends_it(tmp_path):
    data = make_folder(tmp_path / "data")
    run = "from vla_rlaif.cli import main; main()"
    command = [sys.executable, "-c", run, "label", str(data), "--ui", "--port", "0", "--pairs", "7"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert "16 episodes" in lines[0] and "0 of 7 pairs are labelled by hand" in lines[0]
        url = lines[1].removeprefix("label at ").strip()
        with urllib.request.urlopen(url, timeout=30) as page:
            assert b"Which clip is better?" in page.read()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and "0 of 7 pairs are labelled by hand" in rest
    assert json.loads((data / "labels.agreement.json").read_text())["labellers"] == []
    assert url.split("/")[3] == (data / "labels.sqlite.token").read_text().strip()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--held-out", "0.9"], "held-out in"),
        (["--pairs", "0"], "0 pairs are wanted"),
        (["--cameras", "left"], "has no camera 'left'; it has top"),
        (["--repeat", "1.5"], "repeat must be in"),
        (["--fps", "0"], "fps is 0"),
        (["--port", "70000"], "port is 70000"),
        (["--store", "nowhere/labels.sqlite"], "nowhere"),
    ],
)
def test_wrong_options_are_named(tmp_path, flags, message):
    data = make_folder(tmp_path / "data")
    with pytest.raises(ValueError, match=message):
        main([str(data), "--ui", *flags], print)


def test_a_store_of_other_episodes_is_named(tmp_path):
    few = make_folder(tmp_path / "few", 4)
    with PreferenceStore(tmp_path / "labels.sqlite") as store:
        desk = desk_of(store, sampled(16))
        desk.join("ana")
        for _ in range(20):
            reply(desk, "ana")
    with pytest.raises(ValueError, match=r"labels of \d+ episodes that .*few does not hold"):
        main([str(few), "--ui", "--store", str(tmp_path / "labels.sqlite")], print)


CONFIG = {
    "env": {"type": "point_reach", "num_envs": 8},
    "policy": {"type": "gaussian", "backend": "torch"},
    "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2},
}


def labeller_config(**settings):
    reward = {"type": "preference", "encoder": {"type": "cnn"}, "labeller": {"type": "human", **settings}}
    found = parse_config({**CONFIG, "reward": reward}, source="test").reward
    assert isinstance(found, PreferenceRewardConfig)
    return found.labeller


def test_a_config_makes_the_labeller(tmp_path):
    labeller = build_labeller(labeller_config(deadline_s=60, cameras=["top"], port=0), tmp_path)
    assert isinstance(labeller, HumanLabeller)
    labeller.probe(SPEC)
    assert not list(tmp_path.iterdir())  # nothing is opened before there is something to label


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deadline_s": 0}, "reward.preference.labeller.human.deadline_s"),
        ({"at_deadline": "wait"}, "at_deadline"),
        ({"repeat": 1}, "repeat"),
        ({"dead_line": 5}, "did you mean deadline_s"),
    ],
)
def test_wrong_keys_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        labeller_config(**settings)


def test_what_would_stop_the_run_later_stops_it_at_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        busy = HumanLabeller(
            tmp_path / "h", PageSettings(port=port), deadline_s=1.0, skip_at_deadline=False, say=lambda text: None
        )
        with pytest.raises(ValueError, match=rf"cannot listen on 127.0.0.1:{port}"):
            busy.probe(SPEC)
    labeller = build_labeller(labeller_config(cameras=["wrist"]), tmp_path)
    assert isinstance(labeller, ProbedLabeller)
    with pytest.raises(ValueError, match=r"cameras names 'wrist'; the env has the cameras top"):
        labeller.probe(SPEC)
