"""Weights through a file: where a shared file system is all that connects the machines, and for who wants to look.

The file is a plain safetensors one, by the parameters' names. With bfloat16 on the wire it holds the rounded numbers as
float32, so that anybody can read it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from vla_rlaif.dist.manifest import Bytes, Manifest, ManifestError, layout_of
from vla_rlaif.dist.payload import pack, unpack
from vla_rlaif.dist.tickets import Desk


@dataclass(frozen=True, kw_only=True)
class DiskTicket:
    """A payload in a file that the receiver can read."""

    path: Path
    token: str = ""

    def fetch(self, manifest: Manifest, desk: Desk) -> Bytes:
        weights = load_file(self.path)
        if layout_of(weights) != manifest.layout:
            raise ManifestError(f"{self.path} does not hold what its manifest says: it is not the learner's file.")
        memory = desk.room(manifest.num_bytes)
        pack(weights, manifest.entries, memory, threads=1)
        desk.check.up_to(memory, len(memory))
        return memory


def write_payload(path: Path, manifest: Manifest, memory: Bytes) -> DiskTicket:
    """The file appears complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    weights = unpack(manifest, memory, lambda num_bytes: np.empty(num_bytes, np.uint8))
    save_file(weights, part, {"version": str(manifest.version)})
    os.replace(part, path)
    return DiskTicket(path=path)
