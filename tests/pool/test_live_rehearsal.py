"""A day, a night and a morning on real Ray: the committed rehearsal, in which schedulers are killed in transitions.

One node with 8 fake GPUs, two schedulers at a time, five of them killed; see benchmarks/pool_live.py. Windows are
multiples of what a process takes to start here and now, so that a busy machine rehearses a longer day.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    "POOL_REHEARSAL" not in os.environ,
    reason="takes minutes and both cores: set POOL_REHEARSAL=1 to rehearse a day on Ray",
)
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "pool_live.py"
KILLS = 5


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rehearsal")
    command = [sys.executable, str(BENCHMARK), "--kills", str(KILLS), "--out", str(folder / "figures.json")]
    done = subprocess.run([*command, "--folder", str(folder)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "figures.json").read_text())


def test_robots_get_an_answer_to_every_request(figures: dict[str, Any]) -> None:
    assert figures["failed_requests"] == 0, figures["troubles"]
    assert figures["requests_in_transitions"] > 20


def test_killed_schedulers_are_replaced_and_nothing_is_done_twice(figures: dict[str, Any]) -> None:
    assert figures["kills"] == KILLS
    assert figures["done_twice"] == 0
    assert figures["orders"] > 40
    assert figures["out_of_order"] == 0
    assert figures["read_only_schedulers"] >= 1


def test_training_goes_on_as_if_nothing_had_happened(figures: dict[str, Any]) -> None:
    """On 4 GPUs to the last bit, night and collected groups included; on another number up to the order of sums."""
    assert figures["each_step_once"]
    assert set(figures["train_gpus"]) == {"2", "4"}
    assert len(figures["resumed_at"]) >= 2
    assert figures["metrics_bit_equal_until_step"] >= figures["resumed_at"][-1]
    assert figures["loss_max_difference"] < 1e-5
    assert figures["success_equal"]


def test_the_nights_groups_are_used_once_and_in_time(figures: dict[str, Any]) -> None:
    assert figures["groups_twice"] == 0
    assert (figures["episodes_used"], figures["ages_used"]) == (64, {"0": 1})


def test_the_ledger_is_exact(figures: dict[str, Any]) -> None:
    assert figures["ledger_exact"]
    assert figures["useful_share"] > 0.2
