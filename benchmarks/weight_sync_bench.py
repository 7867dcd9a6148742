"""A learner and its receivers on Ray, and what is measured with them; for weight_sync.py."""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import weight_sync_ends as ends

from vla_rlaif.cluster_config import RayClusterConfig, SyncConfig
from vla_rlaif.dist.answers import answers
from vla_rlaif.dist.fleet import Health
from vla_rlaif.dist.manifest import BLOCK
from vla_rlaif.dist.process_groups import GroupSpec, open_store
from vla_rlaif.dist.ray_cluster import RayCluster
from vla_rlaif.dist.weight_sync import GroupSync

WARM = 3  # rounds left out: as many as there are buffers
LONG_S = 600.0


def seconds_of(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


class Bench:
    """A learner and its receivers on Ray, of one size."""

    def __init__(self, millions: float, *, receivers: int, repeats: int, bucket_mb: int, apart: bool) -> None:
        """``apart``: the learner on the node with the label side a, the receivers on that with side b."""
        roles: dict[str, Any] = {"learner": {}, "rollout": {"workers": receivers}}
        if apart:
            roles["learner"]["labels"], roles["rollout"]["labels"] = {"side": "a"}, {"side": "b"}
        config = {"type": "ray", "roles": roles, "faults": {"start_timeout_s": LONG_S, "silent_s": 120.0}}
        self.cluster = RayCluster(RayClusterConfig.model_validate(config))
        self.learner = self.cluster.start("learner", partial(ends.LearnerEnd, millions=millions), 1)
        self.actors = self.cluster.start("rollout", ends.ActorEnd, receivers)
        self.repeats, self.bucket_mb, self.num_bytes = repeats, bucket_mb, 0

    def close(self) -> None:
        self.cluster.close()

    def sync(self, transport: str, *, bucket_mb: int | None = None) -> GroupSync:
        config = {"transport": transport, "bucket_mb": bucket_mb or self.bucket_mb}
        return GroupSync(self.learner, self.actors, SyncConfig.model_validate(config))

    def publish(self, sync: GroupSync) -> dict[str, Any]:
        """One round and its seconds; checks that what acts is what was sent."""
        answers([self.learner.rank0(ends.step)], LONG_S, "a step")
        begun = time.perf_counter()
        result = sync.publish()
        total = time.perf_counter() - begun
        assert result.ok and not result.stale, result.problems
        self.num_bytes = result.num_bytes
        adopted = answers(self.actors.all(ends.adopt), LONG_S, "adopting")
        assert {version for _, version, _ in adopted} == {result.version}
        assert len({value for _, _, value in adopted}) == 1
        return {
            "total": total,
            "gather": result.gather_s,
            "transfer": result.transfer_s,
            "commit": result.commit_s,
            "adopt": max(seconds for seconds, _, _ in adopted),
        }

    def transport(self, name: str, *, bucket_mb: int | None = None, copying: bool = False) -> dict[str, Any]:
        sync = self.sync(name, bucket_mb=bucket_mb)
        rounds = [self.publish(sync) for _ in range(WARM + self.repeats)][WARM:]
        table = {f"{part}_s": statistics.median(each[part] for each in rounds) for part in rounds[0]}
        table["best_s"] = min(each["total"] for each in rounds)
        if copying:
            answers(self.actors.all(ends.copy_from_now_on), LONG_S, "preparing copies")
            copied = [self.publish(sync)["adopt"] for _ in range(self.repeats)]
            table["adopt_by_copy_s"] = statistics.median(copied)
        table["peak_mb"] = [
            round(peak / 1e6)
            for group in (self.learner, self.actors)
            for peak in answers(group.all(ends.peak_bytes), LONG_S, "looking")
        ]
        return table

    def turns(self, transport: str) -> dict[str, float]:
        """Ours, the bare operations and a memcpy of this process in turns, so that other load meets them all. Medians,
        and medians of the ratios of neighbours: how often as long as ours each takes."""
        sync = self.sync(transport)
        for _ in range(WARM):
            self.publish(sync)
        self.make_room()
        collective, store = self.collective(self.bucket_mb << 20), self.object_store(as_torch=False)
        memory = np.ones((2, self.num_bytes // 2), np.uint8)

        def memcpy() -> None:
            """As many bytes, one half onto the other and back: there may be no room for both."""
            memory[0] = memory[1]
            memory[1] = memory[0]

        bare = {"memcpy": memcpy, "bare_ray": store, "bare_gloo": collective}
        times: dict[str, list[float]] = {name: [] for name in ("ours", *bare)}
        for number in range(1 + self.repeats):
            now = {"ours": self.publish(sync)["total"]} | {name: seconds_of(work) for name, work in bare.items()}
            for name, seconds in now.items() if number else ():  # the first of each makes its room
                times[name].append(seconds)
        found = {f"{name}_s": statistics.median(each) for name, each in times.items()}
        for name in bare:
            ratios = [other / ours for other, ours in zip(times[name], times["ours"], strict=True)]
            found[f"{name} / ours"] = statistics.median(ratios)
        return found

    def bare(self, work: Callable[[], None], repeats: int | None = None) -> dict[str, float]:
        work()
        times = [seconds_of(work) for _ in range(repeats or self.repeats)]
        return {"total_s": statistics.median(times), "best_s": min(times)}

    def make_room(self) -> None:
        work = partial(ends.make_room, num_bytes=self.num_bytes)
        answers([*self.learner.all(work), *self.actors.all(work)], LONG_S, "making room")

    def collective(self, bucket_bytes: int) -> Callable[[], None]:
        """Bare gloo: nothing but the operations."""
        [port] = answers([self.learner.rank0(open_store)], LONG_S, "opening a store")
        members = [self.learner.handles[0], *self.actors.handles]
        generation = time.time_ns()
        specs = [
            GroupSpec(
                generation=generation,
                address=members[0].place.address,
                port=port,
                rank=rank,
                size=len(members),
                own_address=member.place.address,
                backend="gloo",
                bucket_bytes=bucket_bytes,
                timeout_s=60.0,
            )
            for rank, member in enumerate(members)
        ]

        def once() -> None:
            asked = [m.ask(partial(ends.broadcast, spec=s)) for m, s in zip(members, specs, strict=True)]
            answers(asked, LONG_S, "broadcasting")

        return once

    def object_store(self, *, as_torch: bool) -> Callable[[], None]:
        """Bare `ray.put`, and get, and a copy."""

        def once() -> None:
            [ref] = answers([self.learner.rank0(partial(ends.put, as_torch=as_torch))], LONG_S, "putting")
            answers(self.actors.all(partial(ends.take, ref=ref)), LONG_S, "taking")

        return once

    def dead(self, transport: str) -> dict[str, Any]:
        """One worker is killed -9 in the middle of a transfer: seconds from its death."""
        sync = self.sync(transport)
        for _ in range(WARM):
            self.publish(sync)
        victim, seen = self.actors.handles[0 if transport == "relay" else -1], list[float]()  # one that checks
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.002):
                if self.actors.health.health(victim.name) is Health.DEAD:
                    seen.append(time.time())
                    return

        with tempfile.TemporaryDirectory() as folder:
            note = f"{folder}/death"
            blocks = self.num_bytes // 4 // BLOCK  # each of two receivers checks half of what both map
            answers([victim.ask(partial(ends.die_after, blocks=blocks, note=note))], LONG_S, "preparing")
            answers([self.learner.rank0(ends.step)], LONG_S, "a step")
            watcher = threading.Thread(target=watch)
            watcher.start()
            result = sync.publish()
            done = time.time()
            stop.set()
            watcher.join()
            died = float(Path(note).read_text())
        assert result.ok and result.stale == (victim.name,), (result.stale, result.problems)
        begun = time.perf_counter()
        self.actors.restart(victim)
        restarted = time.perf_counter()
        assert sync.catch_up().stale == ()
        return {
            "detected_s": (seen[0] if seen else done) - died,
            "next_version_s": done - died,
            "restart_s": restarted - begun,
            "catch_up_s": time.perf_counter() - restarted,
        }
