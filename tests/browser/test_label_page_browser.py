"""The labelling page in a browser, as people use it: by keys, by mouse, two at once, over reloads and restarts."""

import sqlite3

import numpy as np
import pytest
from label_serving import Background, make_scenes
from polling import until

from vla_rlaif.label_page.catalogue import FolderCatalogue
from vla_rlaif.preferences.store import PreferenceStore


@pytest.fixture
def data(tmp_path):
    return make_scenes(tmp_path / "data")


@pytest.fixture
def server(data):
    server = Background(data)
    yield server
    server.stop()


def records(data):
    with PreferenceStore(data / "labels.sqlite") as store:
        return store.records()


def sides(page):
    """The pair on the screen, when its clips are there and an answer counts."""
    page.wait_for_selector(".answer[aria-disabled=false]")
    return page.evaluate("[question.left.id, question.right.id]")


def enter(page, server, name="ana"):
    page.goto(server.url)
    page.get_by_label("Name").fill(name)
    page.get_by_role("button", name="Start").click()
    return sides(page)


def press(page, key):
    """Answer by a key; returns the pair that was on the screen."""
    shown = sides(page)
    page.keyboard.press(key)
    until(page, "([a, b]) => !question || question.left.id !== a || question.right.id !== b", shown)
    return shown


def count(page):
    return page.locator("#count").inner_text()


def test_a_person_labels_by_keys_alone(server, page_in, data, shoot):
    page = page_in()
    page.goto(server.url)
    shoot(page, "welcome")
    page.keyboard.type("ana")
    page.keyboard.press("Enter")
    sides(page)
    shoot(page, "work")
    shown = [press(page, key) for key in ("ArrowLeft", "ArrowRight", "ArrowUp", "=", "s")]
    assert [(r.first, r.second) for r in records(data)] == [tuple(pair) for pair in shown]
    assert [r.p_first for r in records(data)] == [1.0, 0.0, 0.5, 0.5, None]
    assert count(page) == "5 of 12 pairs" and "Stored: skipped." in page.locator("#notice").inner_text()
    assert page.title() == "(7) Which clip is better?"
    page.keyboard.press("u")
    page.wait_for_selector("#reopened:not([hidden])")
    assert sides(page) == shown[-1]
    shoot(page, "undone")
    press(page, "ArrowRight")
    assert [(r.p_first, r.corrects) for r in records(data)][-1] == (0.0, 6) and len(records(data)) == 5
    for _ in range(7):
        press(page, "ArrowLeft")
    assert "All done" in page.locator("#rest").inner_text()
    shoot(page, "done")
    page.keyboard.press("u")  # still possible
    sides(page)
    assert count(page) == "11 of 12 pairs"


def test_a_person_labels_by_mouse(server, page_in, data):
    page = page_in()
    enter(page, server)
    page.get_by_role("button", name="Right is better").click()
    until(page, "state.progress.done === 1")
    sides(page)
    page.locator("#work .undo").click()
    page.wait_for_selector("#reopened:not([hidden])")
    sides(page)
    page.get_by_role("button", name="Skip").click()
    until(page, "state.progress.mine.skips === 1")
    assert [(r.p_first, r.corrects) for r in records(data)] == [(None, 2)]


def test_the_clips_are_drawn_frame_by_frame(server, page_in, data):
    """What the canvas shows is the episode's frame, to the bit."""
    page = page_in(reduced_motion="reduce")
    left, _ = enter(page, server)
    until(page, "views.every(view => view.sheet)")
    frames = FolderCatalogue(data).frames([left])[left]
    last = page.evaluate("player.frames - 1")
    assert page.evaluate("player.playing") is False and page.evaluate("Math.floor(player.frame)") == last
    for frame in (last, last - 1, 0):
        page.evaluate("frame => seek(frame)", frame)
        for number, camera in enumerate(("top", "wrist")):
            pixels = page.evaluate(
                "number => [...views[number].canvas.getContext('2d').getImageData(0, 0, 64, 64).data]", number
            )
            drawn = np.array(pixels, np.uint8).reshape(64, 64, 4)[..., :3]
            np.testing.assert_array_equal(drawn, frames[camera][min(frame, len(frames[camera]) - 1)])


def test_playing_pausing_scrubbing_speed_loop_and_cameras(server, page_in):
    page = page_in()
    enter(page, server)
    until(page, "views.every(view => view.sheet)")
    until(page, "player.frame > 0.5")
    page.keyboard.press("Space")
    assert page.locator("#play").inner_text() == "Play"
    page.keyboard.press(".")
    before = page.locator("#frame").inner_text()
    page.keyboard.press(",")
    assert page.locator("#frame").inner_text() != before or before.startswith("1 ")
    page.keyboard.press(">")
    assert page.locator("#speed").input_value() == "2"
    page.locator("#speed").select_option("4")
    page.keyboard.press("l")
    page.keyboard.press("Space")
    until(page, "!player.playing")  # at the end, since it does not loop
    assert page.evaluate("player.frame === player.frames - 1")
    page.locator("#scrub").focus()
    page.keyboard.press("ArrowLeft")  # scrubs, and does not answer
    until(page, "Math.floor(player.frame) === player.frames - 2")
    assert page.evaluate("state.progress.done") == 0
    assert page.locator("canvas").count() == 4
    page.get_by_role("checkbox", name="wrist").uncheck()
    assert page.locator("canvas").count() == 2
    page.reload()
    sides(page)
    assert page.locator("canvas").count() == 2  # remembered


def test_a_reload_and_a_restart_go_on(server, page_in, data):
    page = page_in()
    page.expected.extend(["WebSocket connection", "net::ERR_"])  # the browser's own words that the server is away
    enter(page, server)
    press(page, "ArrowLeft")
    shown = sides(page)
    page.reload()
    assert sides(page) == shown and count(page) == "1 of 12 pairs"
    server.stop()
    page.wait_for_selector("#banner:not([hidden])")
    page.keyboard.press("ArrowLeft")
    server.start()
    page.wait_for_selector("#banner", state="hidden")
    until(page, "state.progress.done === 1")
    press(page, "ArrowRight")
    assert [r.p_first for r in records(data)] == [1.0, 0.0]


def test_two_people_at_once_do_not_clash(server, page_in, data, shoot):
    ana, ben = page_in(), page_in()
    enter(ana, server, "ana")
    enter(ben, server, "ben")
    pairs = set()
    for _ in range(6):
        one, two = press(ana, "ArrowLeft"), press(ben, "ArrowRight")
        assert set(one) != set(two)
        pairs |= {frozenset(one), frozenset(two)}
    assert len(pairs) == 12
    until(ana, "state.progress.done === 12")
    assert ana.locator("#people tbody tr").all_inner_texts() == ["ana\t6\t0\t0\there", "ben\t6\t0\t0\there"]
    shoot(ana, "people")
    assert sorted({(r.labeller, r.p_first) for r in records(data)}) == [("human/ana", 1.0), ("human/ben", 0.0)]


def test_a_held_key_is_one_answer(server, page_in, data):
    page = page_in()
    enter(page, server)
    page.keyboard.down("ArrowLeft")
    for _ in range(10):
        page.keyboard.down("ArrowLeft")  # as the keyboard repeats it
    page.keyboard.up("ArrowLeft")
    until(page, "state.progress.done === 1")
    assert len(records(data)) == 1


def test_a_locked_store_is_said(server, page_in, data, shoot):
    page = page_in()
    shown = enter(page, server)
    other = sqlite3.connect(data / "labels.sqlite", autocommit=True)
    other.execute("BEGIN IMMEDIATE")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#notice.bad")
    assert "is locked" in page.locator("#notice").inner_text()
    shoot(page, "locked")
    other.execute("ROLLBACK")
    other.close()
    assert press(page, "ArrowLeft") == shown and len(records(data)) == 1


def test_a_name_that_is_none_is_refused_on_the_spot(server, page_in):
    page = page_in()
    page.goto(server.url)
    page.get_by_label("Name").fill("<b>ana</b>")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#name-problem').textContent.includes('is no name')")
    page.get_by_label("Name").fill("ana")
    page.keyboard.press("Enter")
    sides(page)


def test_a_clip_that_cannot_be_read_is_said_and_skipped(server, page_in, data):
    shard = data / "episodes-00000.npz"
    shard.write_bytes(shard.read_bytes()[:3000])
    page = page_in()
    page.expected.append("status of 500")
    enter(page, server)
    page.wait_for_selector(".view .problem")
    assert "damaged or missing" in page.locator(".view .problem").first.inner_text()
    press(page, "s")
    page.wait_for_selector(".view .problem")


def test_without_the_token_there_is_nothing(server, page_in):
    page = page_in()
    page.expected.append("status of 403")
    response = page.goto(f"http://127.0.0.1:{server.port}/")
    assert response.status == 403 and "with its token" in page.content()


OVERFLOW = """() => [...document.querySelectorAll('body *')].filter(e => e.getClientRects().length
    && e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
    .map(e => e.tagName + '.' + e.className)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(390, 844), (768, 1024), (1280, 800)])
def test_nothing_overflows(server, page_in, shoot, width, height, scheme):
    page = page_in(width, height, color_scheme=scheme)
    page.goto(server.url)
    assert page.evaluate(OVERFLOW) == []
    enter(page, server, "a-name-as-long-as-it-can-be-0123456789-x")
    press(page, "ArrowLeft")
    page.locator("#help summary").click()
    page.locator("#figures summary").click()
    sides(page)
    assert page.evaluate(OVERFLOW) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shoot(page, f"{width}-{scheme}")
    # Text and what lies behind it differ enough (WCAG 2.1, 4.5 to 1).
    for selector in ("#task", "#count", "#notice", ".answer span", "#who", "summary", "kbd", "td", "#frame"):
        assert page.evaluate(CONTRAST, selector) >= 4.5, selector


CONTRAST = """selector => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (rgb) => rgb.slice(0, 3).map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const element = document.querySelector(selector);
  let behind = element;
  while (behind && (parse(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
  const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind || document.body).backgroundColor]
    .map(text => luminance(parse(text)) + 0.05);
  return Math.max(a, b) / Math.min(a, b);
}"""


def test_the_focus_is_visible_and_everything_can_be_reached_by_tab(server, page_in):
    page = page_in()
    enter(page, server)
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(20):  # there are 16 stops
        page.keyboard.press("Tab")
        style = page.evaluate(
            """() => { const e = document.activeElement, s = getComputedStyle(e);
            return [e.id || e.dataset.answer || e.tagName, s.outlineStyle, parseFloat(s.outlineWidth)]; }"""
        )
        reached.append(style[0])
        assert style[0] == "BODY" or (style[1] == "solid" and style[2] >= 2), style
    assert {"rename", "play", "scrub", "speed", "loop", "left", "tie", "right", "skip"} <= set(reached)


def test_different_tasks_are_shown_with_their_clips(tmp_path, page_in, shoot):
    server = Background(make_scenes(tmp_path / "data"), desk={"wanted": 40})
    try:
        page = page_in()
        enter(page, server)
        for _ in range(40):
            if page.evaluate("question.left.instruction !== question.right.instruction"):
                break
            press(page, "ArrowLeft")
        assert "Two different tasks" in page.locator("#task").inner_text()
        assert page.locator(".own-task").all_inner_texts() == page.evaluate(
            "[question.left.instruction, question.right.instruction]"
        )
        shoot(page, "tasks")
        page.close()
    finally:
        server.stop()
