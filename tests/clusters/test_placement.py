"""Placement by hand on 64 simulated GPUs, and against brute force on small clusters."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rlaif.cluster_config import RayClusterConfig
from vla_rlaif.config import parse_config
from vla_rlaif.dist.placement import Bundle, Node, Seat, bundles_of, nodes_of, place


def layouts() -> dict[str, dict[str, Any]]:
    """The cluster sections that docs/cluster.md lists, by name."""
    blocks = [block.split("```")[0] for block in (DOCS / "cluster.md").read_text().split("```yaml\n")[1:]]
    named = [block.split("\n", 1) for block in blocks if block.startswith("# layout: ")]
    return {head.removeprefix("# layout: "): yaml.safe_load(text) for head, text in named}


DOCS = Path(__file__).parents[2] / "docs"
# The layouts of docs/cluster.md, and how many of 64 GPUs each takes: 16 + 40 + 4 + 4, 64 shared, 8 + 24, 8 + 8.
NUM_GPUS = {"disaggregated": 64, "colocated": 64, "one large learner": 32, "simulation apart": 16}
LAYOUTS = layouts()


def cluster_of(**settings: Any) -> RayClusterConfig:
    return RayClusterConfig.model_validate({"type": "ray", **settings})


def nodes(count: int = 8, *, gpus: int = 8, cpus: float = 96.0, **labels: str) -> list[Node]:
    return [Node(name=f"node-{i}", gpus=gpus, cpus=cpus, labels=labels) for i in range(count)]


POOL = [*nodes(kind="gpu"), *[Node(name=f"cpu-{i}", cpus=128.0, labels={"kind": "cpu"}) for i in range(4)]]


def check(bundles: Sequence[Bundle], there: Sequence[Node], where: dict[str, str]) -> None:
    """No node gives more than it has, and labels are those that were asked for."""
    assert set(where) == {bundle.name for bundle in bundles}
    for node in there:
        here = [bundle for bundle in bundles if where[bundle.name] == node.name]
        assert sum(bundle.gpus for bundle in here) <= node.gpus
        assert sum(bundle.cpus for bundle in here) <= node.cpus
        for bundle in here:
            assert bundle.labels.items() <= node.labels.items()


@pytest.mark.parametrize("strategy", ["pack", "spread"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_documented_layouts_fit_on_64_gpus(name: str, strategy: str) -> None:
    config = cluster_of(strategy=strategy, **LAYOUTS[name])
    bundles = bundles_of(config)
    check(bundles, POOL, place(bundles, POOL, spread=strategy == "spread"))
    assert sum(bundle.gpus for bundle in bundles) == NUM_GPUS[name]
    seats = Counter(seat.role for bundle in bundles for seat in bundle.seats)
    assert seats == {role: each.workers for role, each in config.roles.present().items()}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"learner": {"workers": 65, "gpus": 1}}, "asks for 65 GPUs, and the cluster has 64"),
        ({"rollout": {"workers": 64, "gpus": 1, "cpus": 16}}, r"asks for 1026 CPUs, and the cluster has 768"),
        # Nodes hold two of three GPUs each, although 51 of 64 GPUs are asked for.
        ({"learner": {"workers": 17, "gpus": 3}}, r"17 times learner \(3 GPUs, 1 CPUs\) asked for.* hold 16 of them"),
        ({"learner": {"gpus": 16}}, r"1 times learner \(16 GPUs, 1 CPUs\) asked for.* hold 0 of them"),
        ({"reward": {"cpus": 100}}, r"1 times reward \(0 GPUs, 100 CPUs\) asked for.* hold 0 of them"),
        ({"rollout": {"labels": {"zone": "b"}}}, r"rollout \(0 GPUs, 1 CPUs, zone=b\) asked for.* hold 0 of them"),
        # 7 of them leave one GPU on each of 7 nodes: no room for a worker of 2 beside 8 of its kind.
        ({"learner": {"workers": 8, "gpus": 7}, "rollout": {"workers": 1, "gpus": 2}}, "no placement of 8 x learner"),
    ],
)
def test_impossible_layouts_are_refused_with_both_numbers(roles: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(bundles_of(cluster_of(roles=roles)), nodes(), spread=False)


def test_pack_fills_nodes_and_spread_does_not() -> None:
    bundles = bundles_of(cluster_of(roles={"rollout": {"workers": 8, "gpus": 1}, "learner": {"gpus": 1}}))
    packed, spread = (place(bundles, nodes(3), spread=spread) for spread in (False, True))
    gpus = lambda where: sorted(Counter(where[b.name] for b in bundles if b.gpus).values())  # noqa: E731
    assert gpus(packed) == [1, 8]
    assert gpus(spread) == [3, 3, 3]


def test_roles_share_gpus_as_the_mode_says() -> None:
    roles: dict[str, Any] = {
        "learner": {"workers": 2, "gpus": 1, "share": 0.5},
        "rollout": {"workers": 4, "gpus": 0.25},
        "reward": {"cpus": 2},
    }
    first, second, reward = bundles_of(cluster_of(mode="colocated", roles=roles))
    assert [(seat.name, seat.slots, seat.share) for seat in first.seats] == [
        ("learner/0", (0,), 0.5),
        ("rollout/0", (0,), 0.25),
        ("rollout/1", (0,), 0.25),
    ]
    assert [seat.name for seat in second.seats] == ["learner/1", "rollout/2", "rollout/3"]
    assert (first.gpus, first.cpus) == (1, 3)
    assert (reward.gpus, reward.cpus, reward.name) == (0, 2, "reward/0")  # it wants no GPU
    apart = bundles_of(cluster_of(roles=roles))
    # Four rollout workers of a quarter share one GPU, and only among themselves.
    assert [(bundle.name, bundle.gpus, len(bundle.seats)) for bundle in apart] == [
        ("learner/0", 1, 1),
        ("learner/1", 1, 1),
        ("rollout/0", 1, 4),
        ("reward/0", 0, 1),
    ]


def test_guests_of_a_large_worker_take_its_gpus_in_turn() -> None:
    roles: dict[str, Any] = {
        "learner": {"gpus": 4, "share": 0.5},
        "rollout": {"workers": 2, "gpus": 2, "share": 0.25, "colocate_with": "learner"},
        "reference": {"workers": 6, "gpus": 0.1, "colocate_with": "learner"},
    }
    [bundle, _] = bundles_of(cluster_of(mode="hybrid", roles=roles))
    slots = {seat.name: seat.slots for seat in bundle.seats}
    assert slots["learner/0"] == (0, 1, 2, 3)
    assert (slots["rollout/0"], slots["rollout/1"]) == ((0, 1), (2, 3))
    assert [slots[f"reference/{i}"] for i in range(6)] == [(0,), (1,), (2,), (3,), (0,), (1,)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"mode": "colocated", "roles": {"learner": {"gpus": 1}, "rollout": {"gpus": 0.4}}},
            r"of one GPU 1\.4 is asked for, and there is 1 \(learner/0 1, rollout/0 0\.4\)",
        ),
        (
            {
                "mode": "hybrid",
                "roles": {"learner": {"gpus": 1, "share": 0.1}, "rollout": {"gpus": 2, "colocate_with": "learner"}},
            },
            "roles.rollout wants 2 GPUs a worker, where it is to lie there are 1",
        ),
    ],
)
def test_gpus_that_are_asked_too_much_of(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bundles_of(cluster_of(**settings))


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"mode": "hybrid"}, "no role has colocate_with"),
        ({"roles": {"rollout": {"colocate_with": "learner"}}}, "colocate_with of roles.rollout is for hybrid"),
        (
            {"mode": "hybrid", "roles": {"rollout": {"gpus": 1, "colocate_with": "rollout"}}},
            "colocated with rollout, which has no GPUs of its own",
        ),
        ({"mode": "hybrid", "roles": {"rollout": {"colocate_with": "learner"}}}, "0 and 0 GPUs a worker"),
        (
            {
                "mode": "colocated",
                "roles": {"learner": {"gpus": 1, "workers": 2}, "rollout": {"gpus": 0.1, "workers": 3}},
            },
            "3 workers do not spread evenly over 2",
        ),
        (
            {
                "mode": "colocated",
                "roles": {"learner": {"gpus": 1, "labels": {"a": "1"}}, "rollout": {"gpus": 0.1, "labels": {"a": "2"}}},
            },
            "different values of the label a",
        ),
        ({"roles": {"learner": {"gpus": 1.5}}}, r"gpus 1\.5: a worker gets a part of one GPU, or whole ones"),
        ({"roles": {"learner": {"gpus": 0.5, "share": 0.5}}}, "share 0.5 is for whole GPUs"),
        ({"roles": {"rollout": {"workers": 3}}}, r"128 does not give 3 rollout workers whole groups.* multiple of 24"),
        ({"roles": {"learner": {"workers": 2}}}, "a JAX learner is one process"),
    ],
)
def test_mistakes_in_the_config_are_named(cluster: dict[str, Any], message: str) -> None:
    data = {"env": {"type": "tabletop"}, "policy": {"type": "octo"}, "cluster": {"type": "ray", **cluster}}
    with pytest.raises(ValueError, match=message):
        parse_config(data, source="test")


def torch_run(**changes: Any) -> dict[str, Any]:
    return {
        "env": {"type": "point_reach", "num_envs": 16},
        "policy": {"type": "gaussian", "backend": "torch"},
        "reward": {"type": "success"},
        "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2},
        "learner": {"minibatch": 48, "micro_batches": 2, **changes.pop("learner", {})},
        "cluster": {"type": "ray", "roles": {"learner": {"workers": 4}}},
        **changes,
    }


def test_learner_ranks_of_torch() -> None:
    parse_config(torch_run(), source="test")
    for changes, message in (
        ({"learner": {"devices": 4}}, "devices 4 is for the devices of one learner"),
        ({"learner": {"minibatch": 36}}, "18 decisions do not split over 4 learner workers"),
        ({"cluster": {"type": "ray", "roles": {"learner": {"workers": 4, "gpus": 2}}}}, "is one rank and uses one GPU"),
        (
            {"loop": {"act_batch": 16}, "cluster": {"type": "ray", "roles": {"rollout": {"workers": 2}}}},
            "the 8 members",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            parse_config(torch_run(**changes), source="test")


def test_nodes_that_the_config_lists() -> None:
    config = cluster_of(nodes=[{"count": 2, "gpus": 8}, {"count": 1, "cpus": 64, "labels": {"kind": "cpu"}}])
    assert [(node.name, node.gpus, node.cpus, node.labels) for node in nodes_of(config.nodes)] == [
        ("node-0", 8, 8.0, {}),
        ("node-1", 8, 8.0, {}),
        ("node-2", 0, 64.0, {"kind": "cpu"}),
    ]


def bundle(index: int, gpus: int, cpus: int) -> Bundle:
    seat = Seat(role="rollout", index=index)
    return Bundle(seats=(seat,), cpus=float(cpus), gpus=gpus, memory_gb=0.0, labels={})


@settings(max_examples=200, deadline=None)
@given(
    wanted=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=5),
    there=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), min_size=1, max_size=3),
    spread=st.booleans(),
)
def test_it_finds_a_placement_exactly_if_there_is_one(
    wanted: list[tuple[int, int]], there: list[tuple[int, int]], spread: bool
) -> None:
    bundles = [bundle(i, gpus, cpus) for i, (gpus, cpus) in enumerate(wanted)]
    pool = [Node(name=str(i), gpus=gpus, cpus=float(cpus)) for i, (gpus, cpus) in enumerate(there)]
    is_possible = any(
        _is_right(wanted, there, choice) for choice in itertools.product(range(len(there)), repeat=len(wanted))
    )
    if is_possible:
        check(bundles, pool, place(bundles, pool, spread=spread))
    else:
        with pytest.raises(ValueError):
            place(bundles, pool, spread=spread)


def _is_right(wanted: list[tuple[int, int]], there: list[tuple[int, int]], choice: tuple[int, ...]) -> bool:
    taken: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for (gpus, cpus), node in zip(wanted, choice, strict=True):
        taken[node][0] += gpus
        taken[node][1] += cpus
    return all(gpus <= there[node][0] and cpus <= there[node][1] for node, (gpus, cpus) in taken.items())


def test_the_example_of_the_docs_is_a_config() -> None:
    text = (DOCS / "cluster.md").read_text().split("```yaml\n")[1].split("```")[0]
    config = parse_config({"env": {"type": "tabletop"}, **yaml.safe_load(text)}, source="docs")
    assert isinstance(config.cluster, RayClusterConfig)
    place(bundles_of(config.cluster), nodes_of(config.cluster.nodes), spread=False)


@pytest.mark.parametrize("path", sorted((DOCS / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_example_jobs_are_yaml_and_start_a_run(path: Path) -> None:
    job = yaml.safe_load(path.read_text())
    command = job["run"] if "run" in job else job["spec"]["entrypoint"]
    assert "vla-rlaif train run.yaml" in command
