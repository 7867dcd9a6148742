"""What the processes of test_rank_group.py do, and a driver that may be killed: `python rank_serving.py`."""

import time

import numpy as np

from vla_rlaif.rank_group import Link, RankGroup


def serve(index: int, link: Link) -> None:
    """Doubles numbers; does as the head says before."""
    link.send({"ready": True})
    while True:
        head, arrays = link.receive()
        if index == head.get("raise"):
            raise KeyError(f"rank {index} has no such camera")
        if index == head.get("raise_late"):
            time.sleep(0.2)
            raise RuntimeError("the others are gone")
        if index == head.get("hang"):
            time.sleep(1000)
        link.send({"index": index, "head": head}, {name: 2 * value for name, value in arrays.items()})


def refuse(index: int, link: Link) -> None:
    raise ValueError(f"rank {index} has no policy folder")


if __name__ == "__main__":
    group = RankGroup(serve, 2, timeout_s=600)
    print(*group.pids, flush=True)
    group.ask("hang", iter([[({"hang": 0}, {"x": np.zeros(1)}), ({}, {})]]))
