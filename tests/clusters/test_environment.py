"""The variables that a worker on Ray starts with."""

import os
import platform
import subprocess

import pytest

from vla_rlaif.dist.ray_actor import STREAMED, environment

NAME = "glibc.cpu.x86_non_temporal_threshold"


def tunables() -> str:
    return environment(threads=1, gpus=(), share=1.0, sends=True)["GLIBC_TUNABLES"]


def test_only_a_sender_copies_past_the_cache(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert "GLIBC_TUNABLES" not in environment(threads=1, gpus=(), share=1.0, sends=False)
    assert tunables() == f"{NAME}={STREAMED:#x}"


def test_what_the_user_has_set_stands(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert tunables() == f"glibc.malloc.check=1:{NAME}={STREAMED:#x}"
    monkeypatch.setenv("GLIBC_TUNABLES", f"{NAME}=0x10000")
    assert tunables() == f"{NAME}=0x10000"


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64", reason="only glibc of x86 has this tunable"
)
def test_glibc_reads_it(monkeypatch):
    """The dynamic loader lists what it has understood; it says nothing about what it does not know."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    loader = "/lib64/ld-linux-x86-64.so.2"  # by the ABI
    variables = {**os.environ, "GLIBC_TUNABLES": tunables()}
    done = subprocess.run([loader, "--list-tunables"], env=variables, capture_output=True, text=True, check=True)
    assert f"{NAME}: {STREAMED:#x} " in done.stdout
