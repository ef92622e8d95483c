"""The machine at hand, in words, for figures that depend on it."""

import platform
from pathlib import Path

import torch

__all__ = ["cpu_name", "describe_machine"]


def cpu_name() -> str:
    """As the operating system calls it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe_machine(device: torch.device) -> str:
    """What a model on that device is trained by."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"
