"""What the benchmarks say about the machine."""

import platform
from pathlib import Path


def processor() -> str:
    """Model of the processor, as the system names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
