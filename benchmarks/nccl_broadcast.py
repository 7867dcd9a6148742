"""The day there are two GPUs: how fast NCCL brings new weights from one to the others. Unmeasured so far.

    python benchmarks/nccl_broadcast.py --out nccl_broadcast.json
    python benchmarks/nccl_broadcast.py --alone           # one GPU, one member: only whether the code runs

One process a GPU, and the link that vla_rlaif/dist uses. Times are the slowest member's, medians:

    bare      ncclBroadcast of a buffer on the GPU, whole and in buckets: the limit
    link      from the learner's host memory to the host memory of every receiver, as the sync does it, with checks
    adopt     from the staged host memory to parameters on the GPU: the pause of a policy that copies
"""

import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
import tyro
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] - public by the manual

from vla_rlaif.dist.payload import checksums, num_threads
from vla_rlaif.dist.process_groups import GroupLink, GroupSpec


@dataclass(frozen=True)
class Options:
    millions: tuple[float, ...] = (27.0, 93.0, 450.0)
    """Of float32 parameters."""
    bucket_mb: tuple[int, ...] = (4, 8, 16, 64)
    repeats: int = 7
    alone: bool = False
    """One GPU and one member: no measurement."""
    out: Path = Path("nccl_broadcast.json")


def main(options: Options) -> None:
    num = torch.cuda.device_count()
    if num < (1 if options.alone else 2):
        raise SystemExit(
            f"This machine has {num} GPUs; NCCL needs one for each member, so two at least. Nothing was measured: "
            "the NCCL path of vla_rlaif is unmeasured until this script has run somewhere."
        )
    size = 1 if options.alone else num
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    processes = [context.Process(target=_member, args=(i, size, store.port, options, answers)) for i in range(size)]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    if failed := [each for each in found if isinstance(each, str)]:
        raise SystemExit("\n".join(failed))
    rows = [{**each[0], "seconds": max(row["seconds"] for row in each)} for each in zip(*found, strict=True)]
    for row in rows:
        row["gb_per_s"] = row["bytes"] / row["seconds"] / 1e9
        print(f"{row['millions']:6g} M  {row['what']:<24} {row['seconds']:.4f} s  {row['gb_per_s']:.1f} GB/s")
    machine = {"gpus": [torch.cuda.get_device_name(i) for i in range(num)], "torch": torch.__version__}
    result = {"machine": machine, "options": asdict(options), "members": size, "rows": rows}
    options.out.write_text(json.dumps(result, indent=1, default=str))


def _member(rank: int, size: int, port: int, options: Options, answers: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)  # as workers of a cluster see only their own
    try:
        answers.put(_measure(rank, size, port, options))
    except Exception as error:
        answers.put(f"member {rank}: {error!r}")


def _measure(rank: int, size: int, port: int, options: Options) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    client = TCPStore("127.0.0.1", port, timeout=datetime.timedelta(seconds=120))

    def meet(name: str) -> None:
        """All members begin together; a small store does, as no collective is trusted yet."""
        place = PrefixStore(name, client)
        place.add("here", 1)
        while int(place.add("here", 0)) < size:
            time.sleep(0.0005)

    def timed(name: str, work: Callable[[], object]) -> float:
        times = []
        for i in range(options.repeats + 1):
            meet(f"{name}/{i}")
            begun = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        return statistics.median(times[1:])

    generation = 0
    for millions in options.millions:
        num_bytes = round(millions * 4e6) // 64 * 64
        host = torch.full((num_bytes,), 1 if rank == 0 else 0, dtype=torch.uint8).pin_memory()
        memory: np.ndarray = host.numpy()
        there = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

        def add(what: str, seconds: float, num_bytes: int = num_bytes, millions: float = millions) -> None:
            rows.append({"millions": millions, "what": what, "seconds": seconds, "bytes": num_bytes})

        for bucket_mb in (-(-num_bytes >> 20), *options.bucket_mb):
            generation += 1
            spec = GroupSpec(
                generation=generation,
                address="127.0.0.1",
                port=port,
                rank=rank,
                size=size,
                own_address="127.0.0.1",
                backend="nccl",
                bucket_bytes=bucket_mb << 20,
                timeout_s=60.0,
            )
            link = spec.join()
            name = "whole" if bucket_mb << 20 >= num_bytes else f"buckets of {bucket_mb} MB"
            add(f"bare, {name}", timed(f"bare/{generation}", partial(link.broadcast, there, _ignore)))
            add(f"link, {name}", timed(f"link/{generation}", partial(_through, link, rank, memory)))
            if not (memory == 1).all():
                raise RuntimeError("what has arrived is not what was sent")
            link.abort()
        add("adopt", timed(f"adopt/{millions}", partial(there.copy_, host)))
    return rows


def _through(link: GroupLink, rank: int, memory: np.ndarray) -> None:
    if rank == 0:
        link.send(memory)
    else:
        link.receive(memory, _ignore)
        checksums(memory, threads=num_threads())


def _ignore(num_bytes: int) -> None:
    del num_bytes


if __name__ == "__main__":
    main(tyro.cli(Options))
