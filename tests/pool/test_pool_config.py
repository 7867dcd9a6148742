import pytest
import yaml
from pool_worlds import FACTORY, SMALL, factory

from vla_rlaif.pool.checks import load_pool
from vla_rlaif.pool.clock import MINUTE
from vla_rlaif.pool.config import Role, parse_pool, read_pool

NIGHT = {"name": "night", "days": "mon-thu", "start": "22:00", "end": "06:00"}


def test_the_example_says_what_the_design_says():
    config = factory()
    assert config.pool.num_gpus == 64 and config.timezone == "Europe/Berlin"
    assert [w.name for w in config.windows] == ["day", "night", "weekend"]
    assert config.windows[1].days == (0, 1, 2, 3) and config.windows[1].start == 22 * 60
    assert config.windows[2].from_ == (4 * 24 + 22) * 60 and config.windows[2].to == 6 * 60
    assert config.shares["day"]["serve"].most == 32 and config.shares["day"]["rollout"].target == 0
    assert config.roles["train"].min_runtime == 20 * MINUTE and config.transition.safety == 1.5
    assert config.ranked == ("serve", "train", "rollout")


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("timezone", "Europe/Berln", r"unknown timezone 'Europe/Berln'; did you mean Europe/Berlin\?"),
        ("windws", [], r"windws: unknown key; did you mean windows\?"),
        ("pool", {"nodes": 8}, r"pool\.gpus_per_node: Field required"),
        ("pool", {"nodes": 0, "gpus_per_node": 8}, r"pool\.nodes: .*greater than 0"),
        ("windows", [], r"windows: .*at least 1"),
        ("windows", [NIGHT | {"strat": "22:00"}], r"windows\.0\.strat: unknown key; did you mean start\?"),
        ("windows", [NIGHT | {"form": "fri 22:00"}], r"form: unknown key; did you mean from\?"),
        ("windows", [NIGHT | {"end": "22:00"}], 'a whole day is start: "00:00", end: "24:00"'),
        ("windows", [{"name": "w", "from": "fri 22:00", "to": "fri 22:00"}], 'a whole week is from: "mon 00:00"'),
        ("windows", [{"name": "w", "days": "mon"}], "needs days, start and end"),
        ("windows", [NIGHT | {"from": "fri 22:00", "to": "mon 06:00"}], "needs days, start and end"),
        ("windows", [NIGHT | {"days": "mon-frii"}], r"'frii' is not a day; did you mean fri\?"),
        ("windows", [NIGHT | {"start": "25:00"}], "not a time of day"),
        ("windows", [NIGHT | {"start": "24:00"}], 'write start: "00:00" on the next day'),
        ("windows", [{"name": "w", "from": "fri", "to": "mon 06:00"}], 'write "fri 22:00"'),
        ("exceptions", [{"use": "weekend"}], "needs dates"),
        ("exceptions", [{"use": "weekend", "dates": []}], "at least one day"),
        (
            "exceptions",
            [{"use": "weekend", "from": "2026-11-02T15:00", "to": "2026-11-02T13:00"}],
            "not after its start",
        ),
        ("exceptions", [{"use": "weekend", "from": "2026-11-02", "to": "2026-11-03T01:00"}], "2026-11-02 has no time"),
        ("exceptions", [{"use": "wekend", "dates": ["2026-12-24"]}], r"wekend has no shares; did you mean weekend\?"),
        ("shares", {"day": {"serv": {"target": 1}}}, r"window line_stop has no shares; known here: day"),
        ("learning", {"staleness": 1}, r"learning\.episodes_per_gpu_hour: Field required"),
        ("transition", {"safety": 0.5}, r"safety: .*greater than or equal to 1"),
        ("transition", {"min_dwell": "10"}, "write it with its unit"),
        ("transition", {"on_overun": "kill"}, r"did you mean on_overrun\?"),
    ],
)
def test_mistakes_are_named(section, value, message):
    with pytest.raises(ValueError, match=message):
        factory(**{section: value})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("shares", "day", "serv"), {"target": 1}, r"shares\.day names the role serv; did you mean serve\?"),
        (("shares", "day", "serve"), {"min": 5, "target": 4}, "min 5, target 4, max 4 must not decrease"),
        (
            ("shares", "day", "serve"),
            {"mn": 5, "target": 4},
            r"shares\.day\.serve\.mn: unknown key; did you mean min\?",
        ),
        (("roles", "train", "prority"), 3, r"roles\.train\.prority: unknown key; did you mean priority\?"),
        (("roles", "train", "preemptible"), "always", "'checkpoint'"),
        (("roles", "train", "gpus_per_replica"), 3, "target 8 is no size of train .* nearest are 6 and 9"),
        (("roles", "train", "sizes"), [2, 4], "target 8 is no size of train .* nearest are 2 and 4"),
        (("roles", "train", "slo"), {"p99_ms": 0}, "greater than 0"),
    ],
)
def test_mistakes_in_shares_and_roles_are_named(path, value, message):
    import copy

    data = copy.deepcopy(SMALL)
    data[path[0]][path[1]][path[2]] = value
    with pytest.raises(ValueError, match=message):
        parse_pool(data, source="test")


def test_yaml_reads_unquoted_times_as_numbers():
    # YAML 1.1 counts in sixties: 22:00 is 1320. Only times without a leading zero are hit, so it is easily overlooked.
    text = FACTORY.read_text().replace('start: "22:00"', "start: 22:00")
    assert yaml.safe_load(text)["windows"][1]["start"] == 1320
    with pytest.raises(ValueError, match='unquoted 22:00 as the number 1320; quote it: "22:00"'):
        parse_pool(yaml.safe_load(text), source="test")


def test_yaml_dates_are_days_and_not_times():
    exceptions = yaml.safe_load("[{use: weekend, from: 2026-11-02, to: 2026-11-03T00:00:00}]")
    with pytest.raises(ValueError, match='2026-11-02 has no time; write "2026-11-02T00:00"'):
        factory(exceptions=exceptions)
    exceptions = yaml.safe_load("[{use: weekend, from: 2026-11-02T10:00:00+01:00, to: 2026-11-03T00:00:00}]")
    with pytest.raises(ValueError, match="has an offset; times are the wall clock of timezone"):
        factory(exceptions=exceptions)


def test_a_missing_file_and_another_yaml(tmp_path):
    with pytest.raises(ValueError, match="has: no YAML file"):
        read_pool(tmp_path / "pool.yaml")
    path = tmp_path / "list.yaml"
    path.write_text("- 1")
    with pytest.raises(ValueError, match="a pool is a mapping of sections"):
        load_pool(path, now=0)


def test_sizes_keep_the_global_batch():
    # 240 micro-batches split over 1, 2, 3, 4, 5, 6, 8, 10, 12, ... replicas, and not over 7, 9 or 11.
    role = Role(priority=1, preemptible="checkpoint", gpus_per_replica=2, global_batch=240)
    assert [n for n in range(25) if role.allows(n)] == [0, 2, 4, 6, 8, 10, 12, 16, 20, 24]
    assert role.at_most(23) == 20 and role.at_most(1) == 0
    # The batch does not depend on the window: replicas x accumulation is always 240.
    assert [(n // 2) * role.accumulation(n) for n in (2, 8, 16, 24)] == [240] * 4
