"""The largest memory that a process has had."""

import re
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_mib() -> float:
    """Of this process, in MiB. (``ru_maxrss`` would begin at that of the process which started it.)"""
    found = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), flags=re.M)
    assert found is not None
    return int(found[1]) / 1024
