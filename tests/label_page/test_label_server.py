"""The page's server over real sockets: its door, its clips, two people at once, reloads and restarts."""

import io
import json
import sqlite3
from typing import Any

import numpy as np
import pytest
from label_serving import TOKEN, get, make_folder, page_of, run, serving
from PIL import Image
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from vla_rlaif.label_page.catalogue import FolderCatalogue
from vla_rlaif.label_page.server import FILES
from vla_rlaif.preferences.store import PreferenceStore


@pytest.fixture
def data(tmp_path):
    return make_folder(tmp_path / "data")


def records(data):
    with PreferenceStore(data / "labels.sqlite") as store:
        return store.records()


def test_the_page_and_its_files_are_served_with_guarding_headers(data):
    async def work():
        async with serving(data) as server:
            assert server.url == f"http://127.0.0.1:{server.port}/{TOKEN}/"
            for path, (_, kind) in FILES.items():
                status, headers, body = await get(server, f"/{TOKEN}/{path}")
                assert (status, headers["Content-Type"]) == (200, f"{kind}; charset=utf-8") and len(body) > 1000
                assert "default-src 'none'" in headers["Content-Security-Policy"]
                assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
                assert "Access-Control-Allow-Origin" not in headers and headers["Cache-Control"] == "no-store"

    run(work())


def test_nothing_is_served_without_the_token_or_under_a_foreign_name(data):
    async def work():
        async with serving(data) as server:
            for path in ("/", "/page.js", "/clip/0%3A0/top", f"/{TOKEN[:-1]}/", f"/{TOKEN}", "/favicon.ico"):
                status, _, body = await get(server, path)
                assert status == 403 and b"with its token" in body
            for host in ("evil.example", "127.0.0.1.evil.example", "192.0.2.1"):
                status, _, body = await get(server, f"/{TOKEN}/", Host=host)
                assert status == 421 and b"this server" in body
            assert (await get(server, f"/{TOKEN}/", Host="localhost:1"))[0] == 200
            assert (await get(server, f"/{TOKEN}/page.css", method="PUT"))[0] == 405
            for path in ("nothing", "../pyproject.toml", "%2e%2e/verb.py", "clip", "clip/0%3A0", "clip/9%3A9/top"):
                assert (await get(server, f"/{TOKEN}/{path}"))[0] == 404
            assert (await get(server, f"/{TOKEN}/clip/0%3A0/left"))[0] == 404

    run(work())


def test_only_its_own_page_may_open_the_socket(data):
    async def work():
        async with serving(data) as server:
            address = f"ws://127.0.0.1:{server.port}/{TOKEN}/socket"
            origins: list[Any] = [None, "http://evil.example", "null", f"http://localhost:{server.port}"]
            for origin in origins:
                with pytest.raises(InvalidStatus, match="403"):
                    await connect(address, origin=origin)
            with pytest.raises(InvalidStatus, match="403"):
                own: Any = f"http://127.0.0.1:{server.port}"
                await connect(address.replace(TOKEN, "x" * 32), origin=own)

    run(work())


def test_clips_are_those_of_the_episodes(data):
    async def work():
        async with serving(data) as server, page_of(server, "ana") as ana:
            side = ana.state["question"]["left"]
            (camera,) = side["cameras"]
            status, headers, body = await get(server, f"/{TOKEN}/{camera['url']}")
            assert (status, headers["Content-Type"]) == (200, "image/webp") and "max-age" in headers["Cache-Control"]
            frames = FolderCatalogue(data).frames([side["id"]])[side["id"]]["top"]
            assert (side["frames"], camera["height"], camera["width"]) == frames.shape[:3]
            sheet = np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))
            np.testing.assert_array_equal(sheet[:8, :8], frames[0])

    run(work())


def test_a_damaged_clip_is_said_and_can_be_skipped(data):
    async def work():
        async with serving(data) as server, page_of(server, "ana") as ana:
            shard = data / "episodes-00000.npz"
            shard.write_bytes(shard.read_bytes()[:3000])
            status, _, body = await get(server, f"/{TOKEN}/{ana.state['question']['left']['cameras'][0]['url']}")
            assert status == 500 and b"damaged or missing" in body
            assert (await ana.answer("skip"))["type"] == "state"

    run(work())
    assert [r.p_first for r in records(data)] == [None]


def test_answers_are_stored_and_the_next_pair_comes(data):
    async def work():
        async with serving(data) as server, page_of(server, "ana") as ana:
            shown = []
            for answer in ("left", "right", "tie", "skip"):
                shown.append(ana.pair)
                following = ana.state["next"]
                await ana.answer(answer)
                assert ana.pair == (following["left"]["id"], following["right"]["id"])
            progress = ana.state["progress"]
            assert (progress["done"], progress["wanted"]) == (4, 12)
            assert progress["mine"] == {"labels": 4, "ties": 1, "skips": 1} and progress["can_undo"]
            found = records(data)
            assert [(r.first, r.second) for r in found] == shown
            assert [r.p_first for r in found] == [1.0, 0.0, 0.5, None]
            assert {r.labeller for r in found} == {"human/ana"}

    run(work())


def test_two_people_at_once_do_not_clash_and_see_each_other(data):
    async def work():
        async with serving(data) as server, page_of(server, "ana") as ana, page_of(server, "ben") as ben:
            await ana.hear()  # that Ben has come
            for _ in range(6):
                assert set(ana.pair) != set(ben.pair)
                await ana.answer("left")
                assert (await ben.hear())["progress"] == ben.state["progress"]
                await ben.answer("right")
                await ana.hear()
            assert not ana.pair and not ben.pair and ana.state["text"] == "finished"
            assert ana.state["people"] == [
                {"name": "ana", "here": True, "labels": 6, "ties": 0, "skips": 0},
                {"name": "ben", "here": True, "labels": 6, "ties": 0, "skips": 0},
            ]
        found = records(data)
        assert len({frozenset((r.first, r.second)) for r in found}) == 12
        assert sorted({(r.labeller, r.p_first) for r in found}) == [("human/ana", 1.0), ("human/ben", 0.0)]

    run(work())


def test_a_reload_and_a_second_tab_show_the_same_pair(data):
    async def work():
        async with serving(data) as server:
            async with page_of(server, "ana") as ana:
                pair = ana.pair
                async with page_of(server, "ana") as tab:
                    assert tab.pair == pair
                    await ana.hear()
                    await ana.answer("left")
                    assert (await tab.hear())["type"] == "state" and tab.pair == ana.pair != pair
                    # The other tab had the old pair on screen a moment ago.
                    said = await tab.say(type="answer", left=pair[0], right=pair[1], answer="right")
                    assert "answered that pair already" in said["notice"]
                pair = ana.pair
            async with page_of(server, "ana") as again:
                assert again.pair == pair

    run(work())
    assert [r.p_first for r in records(data)] == [1.0]


def test_a_restart_goes_on_and_takes_the_answer_that_was_on_its_way(data):
    async def work():
        async with serving(data) as server, page_of(server, "ana") as ana:
            await ana.answer("left")
            shown = ana.pair
        async with serving(data) as server, page_of(server, "ana") as ana:
            assert ana.state["progress"]["done"] == 1
            await ana.say(type="answer", left=shown[0], right=shown[1], answer="right")
            assert ana.state["progress"]["done"] == 2
            await ana.say(type="undo")
            assert ana.pair == shown and ana.state["question"]["previous"] == "right"
            assert ana.state["question"]["reopened"]

    run(work())
    assert [(r.p_first, r.corrects) for r in records(data)] == [(1.0, None), (None, 2)]


def test_a_lease_that_runs_out_frees_the_pair_for_who_waits(data):
    now = [1e9]

    async def work():
        desk = {"wanted": 1, "lease_s": 60.0}
        serve = serving(data, clock=lambda: now[0], desk=desk)
        async with serve as server, page_of(server, "ana") as ana, page_of(server, "ben") as ben:
            assert not ben.pair and "with others" in ben.state["text"]
            now[0] += 59
            await ben.say(type="alive")
            assert not ben.pair
            now[0] += 2
            await ben.say(type="alive")
            assert ben.pair == ana.pair

    run(work())


@pytest.mark.parametrize(
    "message",
    [
        b"\x00\xff",
        "{",
        "[]",
        '{"type": "give_me_all"}',
        '{"type": "join"}',
        '{"type": "join", "name": 7}',
        '{"type": "answer", "left": "0:0", "right": "0:1", "answer": "maybe"}',
        '{"type": "answer", "left": "0:0", "right": "0:1", "answer": "left", "as": "ben"}',
        json.dumps({"type": "answer", "left": "x" * 300, "right": "0:1", "answer": "left"}),
    ],
)
def test_bad_messages_are_refused_and_the_page_lives_on(data, message):
    async def work():
        async with serving(data) as server, page_of(server, "ana") as ana:
            await ana.socket.send(message)
            assert "not a message of this page" in (await ana.hear())["reason"]
            assert (await ana.answer("left"))["type"] == "state"

    run(work())


def test_bad_answers_and_strangers_are_refused(data):
    async def work():
        async with serving(data) as server, page_of(server) as page:
            refused = await page.say(type="answer", left="0:0", right="0:1", answer="left")
            assert "Say who you are" in refused["reason"]
            assert "is no name" in (await page.say(type="join", name="<script>"))["reason"]
            await page.say(type="join", name="ana")
            refused = await page.say(type="answer", left="0:0", right="7:7", answer="left")
            assert "not a pair to be labelled here" in refused["reason"]
            assert "no answer of yours" in (await page.say(type="undo"))["reason"]

    run(work())
    assert not records(data)


def test_who_sends_nonsense_for_ever_is_disconnected(data):
    async def work():
        async with serving(data) as server, page_of(server) as page:
            with pytest.raises(ConnectionClosed):
                for _ in range(50):
                    await page.say(type="nonsense")
            assert page.socket.close_code == 1008
        async with serving(data) as server, page_of(server) as page:
            with pytest.raises(ConnectionClosed):
                await page.say(type="join", name="x" * 10_000)
            assert page.socket.close_code == 1009

    run(work())


def test_a_locked_store_is_said_and_the_answer_can_be_given_again(data):
    async def work():
        async with serving(data) as server, page_of(server, "ana") as ana:
            other = sqlite3.connect(data / "labels.sqlite", autocommit=True)
            other.execute("BEGIN IMMEDIATE")
            pair = ana.pair
            assert "is locked" in (await ana.answer("left"))["reason"]
            other.execute("ROLLBACK")
            other.close()
            await ana.answer("left")
            assert ana.state["progress"]["done"] == 1 and ana.pair != pair

    run(work())


def test_nothing_to_label_is_said_and_what_comes_is_announced(data):
    async def work():
        async with serving(data) as server:
            session = server.session
            await server.begin(None)
            async with page_of(server, "ana") as ana:
                assert (ana.pair, ana.state["text"], ana.state["progress"]) == ((), "idle", None)
                assert "nothing to label" in (await ana.say(type="undo"))["reason"]
                assert (await ana.say(type="alive"))["type"] == "state"
                await server.begin(session)
                await ana.hear()
                assert ana.pair and ana.state["progress"]["done"] == 0

    run(work())


def test_a_port_in_use_is_named(data):
    async def work():
        async with serving(data) as server:
            with pytest.raises(ValueError, match=rf"cannot listen on 127.0.0.1:{server.port}: .*Choose another port"):
                async with serving(data, port=server.port):
                    pass

    run(work())


def test_fewer_pairs_than_asked_for(tmp_path):
    data = make_folder(tmp_path / "few", 3)

    async def work():
        async with serving(data, desk={"wanted": 50}) as server, page_of(server, "ana") as ana:
            for _ in range(3):
                await ana.answer("left")
            assert not ana.pair and ana.state["text"].startswith("There are no more pairs: these episodes make 3")

    run(work())
