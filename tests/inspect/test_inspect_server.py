"""The page's server as other programs meet it: who may ask, what it answers, how it ends."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import quote, urlsplit

import pytest
from inspect_runs import make_run

from vla_rlaif.inspect.library import Library
from vla_rlaif.inspect.routes import Routes
from vla_rlaif.inspect.server import InspectServer
from vla_rlaif.inspect.settings import InspectSettings

TOKEN = "t" * 32


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", steps=4)
    make_run(folder / "going", steps=4, finished=False)
    return folder


@pytest.fixture(scope="module")
def server(root):
    with InspectServer(Routes(Library(root)), InspectSettings(), TOKEN) as server:
        yield server


def get(server, path, method="GET", **headers):
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def ask(server, name, **query):
    text = "&".join(f"{key}={quote(str(value))}" for key, value in query.items())
    status, headers, body = get(server, f"/{TOKEN}/api/{name}?{text}")
    assert status == 200 and headers["Content-Type"].startswith("application/json")
    return json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_only_with_the_token_and_for_this_machine(server):
    assert get(server, f"/{TOKEN}/")[0] == 200
    for path in ("/", "/x/", f"/{TOKEN}", "/api/runs", f"/{TOKEN[:-1]}x/"):
        assert get(server, path)[0] == 403
    assert get(server, f"/{TOKEN}/", Host="evil.example")[0] == 421
    assert get(server, f"/{TOKEN}/", method="POST")[0] == 501
    assert get(server, f"/{TOKEN}/../../../etc/passwd")[0] == 404
    assert get(server, f"/{TOKEN}/js/..%2f..%2froutes.py")[0] == 404


def test_headers_forbid_everything_from_elsewhere(server):
    for path in ("", "page.css", "js/main.js", "api/runs"):
        status, headers, body = get(server, f"/{TOKEN}/{path}")
        assert status == 200 and body
        assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["Cache-Control"] == "no-store"
    text = get(server, f"/{TOKEN}/")[2].decode()
    assert "http" not in text.replace("text/html", "") and "style=" not in text


def test_every_view_has_its_answer(server):
    entries = ask(server, "runs")["entries"]
    assert [entry["name"] for entry in entries] == ["going", "one"] and entries[1]["after"] == [0.9, 0.87, 0.93]
    assert ask(server, "run", run="one")["kind"] == "run"
    part = ask(server, "metrics", run="one")
    assert part["columns"]["step"] == [0, 1, 2, 3]
    assert ask(server, "metrics", run="one", epoch=part["epoch"], first=3)["columns"]["step"] == [3]
    groups = ask(server, "groups", run="one", order="-disagreement")
    assert groups["total"] == 6 and groups["groups"][0]["size"] == 4
    found = ask(server, "episodes", run="one", filter="success:no origin:train", order="-reward")
    rewards = [episode["reward"] for episode in found["episodes"]]
    assert rewards == sorted(rewards, reverse=True) and all(episode["success"] == 0 for episode in found["episodes"])
    group = ask(server, "group", run="one", id="3:5")
    assert [member["id"] for member in group["members"]] == ["3:4", "3:5", "3:6", "3:7"]
    assert group["before"] == "3:0" and "next" not in group  # it is the last one
    episode = ask(server, "episode", run="one", id="3:5")
    assert (
        episode == group["members"][1] and episode["frames"] == len(episode["progress"]) == len(episode["action"]) + 1
    )
    assert len(ask(server, "some", run="one", ids="0:0,after:1")["members"]) == 2
    labels = ask(server, "preferences", run="one", only="kept")
    assert labels["total"] == labels["kept"] == 14 and labels["pairs"][0]["has"] == [True, True]
    assert (
        ask(server, "card", run="one")["card"]["num_episodes"] == 40
        and ask(server, "card", run="going")["card"] is None
    )
    assert ask(server, "stamp", run="one")["finished"] is True
    status, headers, body = get(server, f"/{TOKEN}/sheet?run=one&id=3%3A5&camera=top")
    assert status == 200 and body[:4] == b"RIFF" and "max-age" in headers["Cache-Control"]


@pytest.mark.parametrize(
    ("name", "query", "words"),
    [
        ("run", {"run": "none"}, "has no 'none'"),
        ("run", {"run": "../.."}, "has no"),
        ("run", {}, "lacks run="),
        ("episode", {"run": "one", "id": "99:0"}, "no episode '99:0'"),
        ("episodes", {"run": "one", "filter": "sucess:yes"}, "did you mean success"),
        ("episodes", {"run": "one", "order": "colour"}, "order 'colour'"),
        ("groups", {"run": "one", "limit": "many"}, "no whole number"),
        ("some", {"run": "one", "ids": ",".join(["0:0"] * 17)}, "16 at most"),
        ("preferences", {"run": "one", "only": "best"}, "no pairs 'best'"),
    ],
)
def test_a_mistake_is_an_answer_in_words(server, name, query, words):
    assert words in ask(server, name, **query)["problem"]


def test_a_new_run_and_new_steps_appear(server, root):
    make_run(root / "later", steps=2, finished=False)
    deadline = time.monotonic() + 20
    while len(ask(server, "runs")["entries"]) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_silent_connection_does_not_hold_the_others(server):
    with socket.create_connection(("127.0.0.1", urlsplit(server.url).port)) as silent:
        silent.sendall(b"GET / HT")
        assert get(server, f"/{TOKEN}/")[0] == 200


def test_the_verb_serves_until_it_is_told_to_stop(root):
    command = [sys.executable, "-m", "vla_rlaif", "inspect", str(root / "one")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        found = re.search(r"http://\S+", lines[1])
        assert found is not None, lines
        address = urlsplit(found[0])
        assert address.hostname == "127.0.0.1" and len(address.path) > 20
        connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=20)
        connection.request("GET", f"{address.path}api/runs")
        assert json.loads(connection.getresponse().read())["entries"][0]["name"] == "."
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0 and process.stderr.read() == ""
        connection.close()
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_taken_is_said(root):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
            InspectServer(Routes(Library(root)), InspectSettings(port=port))
