"""What tells one machine from another, for those who want to know whether they share memory."""

import os
import platform
from pathlib import Path


def memory_id() -> str:
    """Equal for two processes exactly if one can map the other's memory through /proc: the kernel's boot, and the
    namespace of process numbers (containers of one host have their own)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():  # not Linux: no such memory either
        return platform.node()
    return f"{boot.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
