"""The inspection page in a browser, as people use it: every view wide and narrow, light and dark, by keys alone, while
a run goes on, over an end and a new start of the server, and over damaged files."""

import json
import shutil

import numpy as np
import pytest
from inspect_runs import add_steps, make_run
from polling import until

from vla_rlaif.inspect.library import Library, open_run
from vla_rlaif.inspect.routes import Routes
from vla_rlaif.inspect.server import InspectServer
from vla_rlaif.inspect.settings import InspectSettings
from vla_rlaif.metrics import MetricsLog, read_metrics

VIEWS = (
    "#/",
    "#/run/one/curves",
    "#/run/one/groups",
    "#/run/one/group/3%3A5",
    "#/run/one/episodes",
    "#/run/one/episode/3%3A5",
    "#/run/one/some/3%3A5%2Cafter%3A1",
    "#/run/one/preferences",
    "#/run/one/card",
    "#/run/one/timeline",
    "#/run/one/settings",
    "#/compare?runs=one%2Cgoing",
    "#/pool/pool",
)
TOKEN = "t" * 32


def start(root, port=0):
    return InspectServer(Routes(Library(root)), InspectSettings(port=port), TOKEN)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder that no test changes."""
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "one", steps=24)
    make_run(root / "going", steps=8, finished=False)
    make_pool(root / "pool")
    return root


@pytest.fixture(scope="module")
def server(finished):
    with start(finished) as server:
        yield server


@pytest.fixture
def own(tmp_path):
    """A folder of a test's own, with a run that goes on."""
    make_run(tmp_path / "going", steps=6, finished=False)
    with start(tmp_path) as server:
        yield tmp_path, server


def make_pool(folder):
    """What a live pool leaves (pool/archive.py)."""
    folder.mkdir()
    hour = 3_600_000_000
    spent = [["train", "night", "active", 40 * hour], ["serve", "day", "active", 24 * hour], ["", "day", "idle", hour]]
    (folder / "record.json").write_text(json.dumps({"start": 0, "now": 10 * hour, "num_gpus": 8, "spent": spent}))
    lines = [
        {"counts": {"at": at * hour, "gpus": [["train", "active", 8 - n], ["serve", "active", n]]}}
        for at, n in enumerate((2, 4, 6, 3))
    ]
    (folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"counts": {"at"')


def show(page, server, view):
    page.goto("about:blank")
    page.goto(f"{server.url}{view}")
    page.wait_for_selector("main > *")


@pytest.mark.parametrize(
    ("width", "scheme", "views"),
    [(1280, "light", VIEWS), (390, "dark", VIEWS), (1280, "dark", VIEWS[:6]), (390, "light", VIEWS[:6])],
)
def test_every_view_fits(server, page_in, shoot, width, scheme, views):
    """Nothing sticks out of the window; what is too wide scrolls in itself."""
    page = page_in(width, 900, color_scheme=scheme, reduced_motion="reduce")
    for view in views:
        show(page, server, view)
        until(page, "[...document.images].every(image => image.complete)")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        assert page.locator("[role=alert]:visible").count() == 0, view
        outside = page.evaluate(
            "[...document.querySelectorAll('main .card, main .clip, header, .transport')]"
            ".filter(one => one.getBoundingClientRect().right > innerWidth + 0.5).map(one => one.className)"
        )
        assert outside == [], view
        spilt = "[...document.querySelectorAll('.clip')].filter(one => one.scrollWidth > one.clientWidth + 1).length"
        assert page.evaluate(spilt) == 0, view
        name = view.removeprefix("#/").replace("/", "_").replace("%", "").replace("?", "_") or "list"
        shoot(page, f"{width}-{scheme}-{name}")


def test_curves_show_values_with_axes_and_under_the_pointer(server, page_in, finished):
    page = page_in()
    show(page, server, "#/run/one/curves")
    chart = page.locator(".chart").first
    assert chart.locator("h3").inner_text() == "Success"
    assert {"0 %", "50 %", "100 %"} <= set(chart.locator("svg text").all_text_contents())
    box = chart.locator("svg").bounding_box()
    page.mouse.move(box["x"] + 47, box["y"] + 40)  # the first step is at the left end of the axis
    until(page, "document.querySelector('.legend b').textContent === '0'")
    line = read_metrics(finished / "one/metrics.jsonl")[0]
    assert f"{100 * line['rollout/success']:.1f} %" in chart.locator(".legend").inner_text()
    page.keyboard.press("s")
    assert page.locator("select").input_value() == "5" and chart.locator("path.faint").count() == 1


HACKED = (  # the reward rises on and on, what is wanted turns round
    {"term/near/mean": 1.0, "term/near/std": 0.5, "term/force/mean": -10.0, "term/force/std": 4.0}
    | {"monitor/sqrt_kl": 0.0, "monitor/gold": 0.5, "monitor/proxy_gain": 0.0, "monitor/strikes": 0.0},
    {"term/near/mean": 1.5, "term/near/std": 0.1, "term/force/mean": -11.0, "term/force/std": 4.0},
    {"term/near/mean": 2.0, "term/near/std": 0.2, "term/force/mean": -12.0, "term/force/std": 4.0}
    | {"monitor/sqrt_kl": 0.8, "monitor/gold": 0.9, "monitor/proxy_gain": 3.0, "monitor/strikes": 1.0},
    {"monitor/sqrt_kl": 0.4, "monitor/gold": 0.25, "monitor/proxy_gain": 8.0, "monitor/strikes": 2.0},
)


def chart_of(page, title):
    return page.locator(".chart").filter(has=page.get_by_role("heading", name=title, exact=True))


@pytest.fixture
def hacked(tmp_path):
    """A run with a monitor and a composite, one without either, and one that goes on."""
    make_run(tmp_path / "going", steps=6, finished=False)
    for name, lines in (("hacked", HACKED), ("plain", ({"rollout/success": 0.5},))):
        make_run(tmp_path / name, steps=0)
        with MetricsLog(tmp_path / name) as log:
            for step, line in enumerate(lines):
                log.write(step, line)
    with start(tmp_path) as server:
        yield server


def test_the_monitor_and_the_terms_have_charts(hacked, page_in, shoot):
    """The proxy on an axis of its own, over a distance that may shrink (a run that goes back); each term against its
    first value in the deviations of its first step: (2 - 1) / 0.5 and (-12 + 10) / 4."""
    page = page_in()
    show(page, hacked, "#/run/hacked/curves")
    chart = chart_of(page, "Proxy and gold")
    chart.locator("text.right").first.wait_for()
    assert chart.locator(".legend b").all_inner_texts() == ["0.250", "8"]  # the newest
    assert chart.locator("text.right").all_text_contents() == ["0", "5"]
    box = chart.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 47, box["y"] + 40)  # the farthest is at the right end, not the newest
    until(page, "document.body.textContent.includes('sqrt(KL) from the start policy 0.8')")
    assert chart.locator(".legend b").all_inner_texts() == ["0.800", "0.900", "3"]
    terms = chart_of(page, "Terms of the reward").locator(".legend").inner_text()
    assert terms.split() == ["force", "\u22120.500", "near", "2"]
    shoot(page, "hacked")
    show(page, hacked, "#/run/plain/curves")
    chart_of(page, "Success").locator(".legend b").wait_for()
    assert page.locator(".chart h3").all_inner_texts() == ["Success"]
    show(page, hacked, "#/compare?runs=hacked%2Cgoing")
    until(page, "document.querySelectorAll('.chart .legend b').length > 0")
    assert chart_of(page, "Proxy and gold").locator(".legend b").count() == 2  # gold of each run
    assert chart_of(page, "Terms of the reward").count() == 0


def test_settings_name_the_code(server, page_in):
    page = page_in()
    show(page, server, "#/run/one/settings")
    shown = page.locator("dl.facts").inner_text()
    assert "abc1234 uncommitted changes" in " ".join(shown.split())


def test_the_clips_of_a_group_play_in_step(server, page_in, finished):
    page = page_in(reduced_motion="reduce")
    show(page, server, "#/run/one/group/3%3A5")
    assert page.locator("figure.clip").count() == 4 and "identical state" in page.locator("main").inner_text()
    source = open_run(finished / "one")
    rewards = [source.table.reward[source.table.id.index(f"3:{k}")] for k in range(4, 8)]
    shown = page.locator("figure.clip dl").all_inner_texts()
    assert all(f"{abs(reward):.3g}"[:4] in text for reward, text in zip(rewards, shown, strict=True))
    longest = max(len(source.frames(f"3:{k}")["top"]) for k in range(4, 8))
    scrub = page.get_by_label("Frame", exact=True)
    assert scrub.input_value() == str(longest - 1)  # stands at the outcome, for a reader who wants no motion
    for frame in (0, 1, longest - 1):
        scrub.fill(str(frame))
        for place, k in enumerate(range(4, 8)):
            frames = source.frames(f"3:{k}")["top"]
            canvas = page.locator("figure.clip").nth(place).locator("canvas").first
            pixels = "one => [...one.getContext('2d').getImageData(0, 0, 32, 32).data]"
            until(page, "one => one.getContext('2d').getImageData(0, 0, 1, 1).data[3] > 0", canvas.element_handle())
            drawn = np.array(canvas.evaluate(pixels), np.uint8).reshape(32, 32, 4)[..., :3]
            np.testing.assert_array_equal(drawn, frames[min(frame, len(frames) - 1)])  # to the bit
    page.get_by_label("Order").select_option("reward")
    ids = page.locator("figure.clip .head a").all_inner_texts()
    assert ids == [f"3:{4 + k}" for k in np.argsort(-np.array(rewards), kind="stable")]


def test_playing_by_keys(server, page_in):
    page = page_in()
    show(page, server, "#/run/one/group/3%3A5")
    assert page.locator(".play").inner_text() == "Pause"
    page.keyboard.press("Space")
    assert page.locator(".play").inner_text() == "Play"
    page.keyboard.press(".")
    before = page.locator(".frame").inner_text()
    page.keyboard.press(",")
    assert page.locator(".frame").inner_text() != before
    page.keyboard.press(">")
    assert page.get_by_label("Speed").input_value() == "4"
    page.keyboard.press("l")
    page.keyboard.press("Space")
    until(page, "document.querySelector('.play').textContent === 'Play'")  # at the end, since it does not loop


def test_everything_is_reached_by_keys_alone(server, page_in, shoot):
    page = page_in()
    show(page, server, "#/")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    until(page, "location.hash === '#/run/one'")
    page.wait_for_selector(".chart")
    page.keyboard.press("?")
    assert page.locator("dialog[open] dd").filter(has_text="Groups").count() == 1
    shoot(page, "keys")
    page.keyboard.press("Escape")
    page.keyboard.press("3")
    page.wait_for_selector("input[type=search]")
    page.keyboard.press("/")
    page.keyboard.type("success:no origin:train")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.filters .number').textContent.includes(' of ')")
    assert set(page.locator("tbody tr td:nth-child(5)").all_inner_texts()) == {"failure"}
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowDown")
    name = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    page.wait_for_selector("figure.clip")
    assert page.locator("#where .here").inner_text() == f"episode {name}"
    page.keyboard.press("g")
    page.wait_for_selector("figure.clip:nth-child(4)")
    assert "/group/" in page.url
    page.keyboard.press("Escape")
    until(page, "location.hash.endsWith('/groups')")
    page.reload()
    page.wait_for_selector("tbody tr")


def test_filters_stay_in_the_address_and_mistakes_are_explained(server, page_in):
    page = page_in()
    show(page, server, "#/run/one/episodes")
    page.get_by_role("button", name="failures").click()
    until(page, "location.hash.includes('success%3Ano')")
    page.reload()
    page.wait_for_selector("tbody tr")
    assert page.get_by_label("Filter").input_value() == "success:no"
    page.get_by_role("button", name="Reward", exact=True).click()
    until(page, "document.querySelector('th[aria-sort=descending]')?.textContent === 'Reward'")
    page.get_by_label("Filter").fill("sucess:no")
    page.keyboard.press("Enter")
    page.wait_for_selector(".problem")
    assert "did you mean success" in page.locator(".problem").inner_text()
    page.get_by_label("Filter").fill("reward:99..")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.note')?.textContent === 'No episode passes the filter.'")


def test_episodes_are_compared(server, page_in):
    page = page_in()
    show(page, server, "#/run/one/episodes")
    for place in (0, 3):
        page.locator("tbody input[type=checkbox]").nth(place).check()
    page.get_by_role("button", name="Compare 2").click()
    page.wait_for_selector("figure.clip")
    assert page.locator("figure.clip").count() == 2


def test_a_labelled_pair_is_played(server, page_in, shoot):
    page = page_in()
    show(page, server, "#/run/one/preferences")
    page.get_by_role("button", name="with clips (14)").click()
    until(page, "document.querySelectorAll('tbody').length === 2")
    page.locator("a.open").first.click()
    page.wait_for_selector("figure.clip")
    assert page.locator("figure.clip").count() == 2
    shoot(page, "pair")


def test_a_running_job_is_followed_without_a_reload(own, page_in):
    root, server = own
    page = page_in()
    show(page, server, "#/run/going/episodes")
    until(page, "document.querySelector('.filters .number').textContent === '16 episodes'")
    other = page_in()
    show(other, server, "#/run/going/curves")
    assert "running" in other.locator("#live").inner_text()
    add_steps(root / "going", 6, 10)
    until(page, "document.querySelector('.filters .number').textContent === '32 episodes'")
    until(other, "[...document.querySelectorAll('.figures dd')].some(one => one.textContent.startsWith('10'))")
    make_run(root / "new", steps=2, finished=False)
    show(page, server, "#/")
    until(page, "document.querySelectorAll('tbody tr').length === 2")


def test_the_server_may_end_and_come_back(tmp_path, page_in):
    make_run(tmp_path / "one", steps=3)
    page = page_in()
    page.expected.extend(["net::ERR_"])  # the browser's own words that the server is away
    with start(tmp_path) as server:
        port = server._server.server_address[1]
        show(page, server, "#/run/one/curves")
    page.wait_for_selector("#banner:not([hidden])")
    assert "No answer" in page.locator("#banner").inner_text()
    with start(tmp_path, port):
        page.wait_for_selector("#banner", state="hidden")


def test_damaged_and_old_runs_are_shown_as_far_as_they_go(own, page_in, shoot):
    root, server = own
    (root / "broken").mkdir()
    (root / "broken/manifest.json").write_text("{")
    run = make_run(root / "old", steps=3)
    shutil.rmtree(run / "episodes")
    (run / "result.json").write_text("{")
    page = page_in()
    until(page, "() => true")
    show(page, server, "#/")
    until(page, "document.body.textContent.includes('broken')")
    shoot(page, "list")
    assert page.locator("td.bad").count() == 1 and page.locator(".tag.bad").count() == 1
    show(page, server, "#/run/broken")
    page.wait_for_selector(".problem")
    assert "damaged" in page.locator(".problem").inner_text()
    show(page, server, "#/run/old/groups")
    page.wait_for_selector("tbody tr")
    assert page.locator("tbody tr").count() == 2  # its test clips
    show(page, server, "#/run/old/curves")
    assert "result.json is damaged" in page.locator(".problem").inner_text()
    show(page, server, "#/run/none")
    page.wait_for_selector(".problem")
    for name in (root / "old/clips.npz", root / "old/result.json"):
        name.unlink()
    show(page, server, "#/run/old/groups")
    until(page, "document.querySelector('.note')?.textContent.includes('kept no episodes')")


def test_a_dataset_has_its_episodes(tmp_path, page_in):
    from inspect_runs import scene_episodes

    from vla_rlaif.dataset import append_episodes

    append_episodes(tmp_path / "data", scene_episodes(2), {})
    with start(tmp_path / "data") as server:
        page = page_in()
        page.goto(server.url)
        page.wait_for_selector("tbody tr")
        assert page.locator("#tabs a").all_inner_texts() == ["Groups", "Episodes8"]
        page.locator("tbody a.open").first.click()
        page.wait_for_selector("figure.clip canvas")
