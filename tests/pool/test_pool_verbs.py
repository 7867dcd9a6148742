"""What operators see: tables, strips, pictures, pages; and the mistakes they are told."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
import yaml
from pool_worlds import FACTORY, SMALL, at
from rich.console import Console

from vla_rlaif.pool.charts import VARIABLES
from vla_rlaif.pool.clock import HOUR
from vla_rlaif.pool.verbs import main

NOW = at("2026-10-23T09:30")


@pytest.fixture
def pool(tmp_path):
    """The factory's file, with its state in a folder of this test."""
    path = tmp_path / "factory.yaml"
    path.write_text(FACTORY.read_text() + f"\nstate_dir: {tmp_path / 'state'}\n")
    return path


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(SMALL | {"state_dir": str(tmp_path / "state")}))
    return path


def run(*argv, now=NOW):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        main([str(a) for a in argv], now=now, console=console)
    return console.export_text()


def test_the_plan_of_eight_days(pool):
    text = run("plan", pool)
    rows = [line.split() for line in text.splitlines() if re.match(r"\s+(day|night|weekend) ", line)]
    assert [row[0] for row in rows[:5]] == ["day", "weekend", "day", "night", "day"]
    # The weekend from Friday 22:00 has 57 hours, for the clocks go back; it is prepared from 21:49, 660 s before.
    assert " ".join(rows[1]) == "weekend Fri 2026-10-23 22:00 CEST Mon 2026-10-26 06:00 CET 57 3 22 39 21:49"
    assert " ".join(rows[3][:-1]) == "night Mon 2026-10-26 22:00 CET Tue 2026-10-27 06:00 CET 8 5 8 51 21:49"
    # 51 rollout GPUs make 20 400 episodes an hour, 8 training GPUs use 8 192; 5 x 1024 may wait.
    # (20 400 - 8 192) x 8 h = 97 664, less what fits into the bucket, by 400 a GPU-hour: 231 to 244 GPU-hours a night.
    assert 231 <= int(rows[3][-1]) <= 244
    assert "in night, 8 train GPUs use what 20 rollout GPUs make; it has 51." in text
    assert "caution: the clocks change in weekend from Fri 2026-10-23 22:00: it lasts 57 h." in text
    assert re.search(r"rollout +serve +5m +declared", text)  # 300 s


def test_the_strips_of_the_plan(pool):
    lines = run("plan", pool).splitlines()
    sunday = next(i for i, line in enumerate(lines) if line.startswith("Sun 25 Oct"))
    assert lines[sunday].rstrip().endswith("25 h")
    bars = [line[13:].rstrip() for line in lines[sunday + 1 : sunday + 4]]
    # Fifty half hours of 3, 22 and 39 of 64 GPUs, in eighths of a block: 1 (at least), 3 and 5.
    assert bars == [chr(0x2580 + level) * 50 for level in (1, 3, 5)]
    friday = next(line for line in lines if line.startswith("Fri 23 Oct"))
    assert friday[13:].startswith(" " * 19 + "|day") and friday.rstrip().endswith("|wee")


def test_the_plan_knows_overrides_and_another_start(pool):
    run("override", pool, "--set", "serve=32", "--for", "2h", "--note", "trade fair")
    text = run("plan", pool)
    assert re.search(r"day .* 09:30 CEST .* 11:30 CEST .* 2 .* 32 .* 32 .* override 1: trade fair", text)
    later = run("plan", pool, "--at", "2026-11-02T12:00")
    assert re.search(r"line_stop .* 13:00 CET .* 15:00 CET .* exception of 2026-11-02", later)


def test_pictures_of_the_plan(pool, tmp_path):
    run("plan", pool, "--picture", tmp_path / "plan.svg")
    texts = [e.text for e in ElementTree.parse(tmp_path / "plan.svg").iter() if e.tag.endswith("text")]
    assert {"serve", "train", "rollout", "day", "night", "weekend", "Fri 23 Oct", "(25 h)"} <= set(texts)
    with pytest.raises(ValueError, match=r"a picture is a \.svg or a \.png file, got plan\.pdf"):
        run("plan", pool, "--picture", tmp_path / "plan.pdf")


class Tags(HTMLParser):
    """Every tag is closed in order, and nothing is loaded from elsewhere."""

    VOID = ("meta", "br", "img", "use")

    def __init__(self):
        super().__init__()
        self.open, self.links, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.links += [values[k] for k in ("src", "href") if k in values]
        self.ids += [values["id"]] if "id" in values else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_two_calendars_side_by_side_on_one_page(tiny, tmp_path):
    other = tmp_path / "all <day>.yaml"
    data = yaml.safe_load(tiny.read_text())
    data["windows"] = [{"name": "day", "from": "mon 00:00", "to": "sun 24:00"}]
    other.write_text(yaml.safe_dump(data))
    html, picture, log, trace = (tmp_path / n for n in ("page.html", "both.png", "log.jsonl", "trace.jsonl"))
    text = run(
        *("simulate", tiny, "--against", other, "--days", "1", "--at", "2026-11-03T00:00", "--node-failures", "1"),
        *("--html", html, "--picture", picture, "--log", log, "--record", trace),
    )
    assert text.count("useful GPU time") == 2 and text.count("serve below its minimum: 0 s") == 2
    page = html.read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and len(tags.ids) == len(set(tags.ids))
    assert all(link.startswith("#") for link in tags.links)
    assert "all &lt;day&gt;" in page and "<day>" not in page
    assert not any(color in page.split("</style>")[1] for color in VARIABLES)  # the page's colours, light and dark
    assert picture.read_bytes().startswith(b"\x89PNG")
    # Both had the same failure, and the trace holds it: a node down and up again.
    kinds = [json.loads(line)["type"] for line in trace.read_text().splitlines()]
    assert kinds == ["node_down", "node_up"]
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    assert {a["pool"] for a in actions} == {"tiny", "all <day>"}
    assert {"drain", "checkpoint", "release", "acquire", "warm", "sync", "admit"} <= {a["action"] for a in actions}
    # The same again from the recorded trace.
    again = run(*("simulate", tiny, "--days", "1", "--at", "2026-11-03T00:00", "--trace", trace))
    first = text[text.index("GPU-hours by state") : text.index("GPU-hours of work")]
    assert first in again


def test_a_simulation_against_a_pool_of_another_size(pool, tiny):
    with pytest.raises(ValueError, match="compared on the same nodes"):
        run("simulate", pool, "--against", tiny)
    with pytest.raises(ValueError, match="days is 0"):
        run("simulate", tiny, "--days", "0")
    with pytest.raises(ValueError, match="write it with its unit"):
        run("simulate", tiny, "--repair", "60")


def test_overrides_by_hand(pool):
    text = run("override", pool, "--use", "night", "--for", "90m", "--note", "fire drill")
    assert "override 1 holds until Fri 2026-10-23 11:00 and then ends by itself" in text
    run("override", pool, "--set", "serve=30", "train=34", "--for", "1h", "--at", "2026-10-23T18:00")
    listed = run("override", pool)
    assert re.search(r"1 +night +Fri 2026-10-23 09:30 +Fri 2026-10-23 11:00 +fire drill", listed)
    assert re.search(r"2 +serve=30 train=34 +Fri 2026-10-23 18:00 +Fri 2026-10-23 19:00", listed)
    assert "cancelled override 2" in run("override", pool, "--cancel", "2")
    assert "fire drill" not in run("override", pool, now=NOW + 2 * HOUR)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--use", "night"], "an override always ends: say how long it lasts, e.g. --for 2h"),
        (["--for", "2h"], "needs --use SHARES or --set ROLE=GPUS"),
        (["--set", "serve=4", "--for", "2h"], "serve=4 is below its min of 16 in day, which stays"),
        (["--set", "serve", "--for", "2h"], "such as serve=32, got 'serve'"),
        (["--use", "nite", "--for", "2h"], r"no shares are called nite; did you mean night\?"),
        (["--use", "night", "--for", "9d"], "lasts 7d at most, got 9d"),
        (["--use", "night", "--for", "1h", "--at", "2026-10-22T09:00"], "not in the past"),
        (["--cancel", "4"], "no override 4 is in force or to come; there are none"),
    ],
)
def test_mistakes_in_overrides(pool, argv, message):
    with pytest.raises(ValueError, match=message):
        run("override", pool, *argv)


def test_verbs_and_files_that_do_not_exist(tmp_path):
    assert "usage: vla-rlaif pool VERB CONFIG.yaml" in run()
    with pytest.raises(ValueError, match="unknown pool verb 'paln'; the verbs are plan, simulate, override"):
        run("paln")
    with pytest.raises(ValueError, match="no config"):
        run("plan", tmp_path / "pool.yaml")


def test_a_plan_loads_nothing_heavy():
    code = (
        "import sys; from vla_rlaif.pool.verbs import main; "
        f"main(['plan', {str(FACTORY)!r}], now={NOW}); "
        "print(sorted({'torch', 'jax', 'ray', 'mujoco', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.splitlines()[-1] == "[]"
