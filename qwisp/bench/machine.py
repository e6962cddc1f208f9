"""Where and with what a report was made."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import qwisp
from qwisp.bench.report import Machine, Source, Versions


def describe_machine(mlx_device: str) -> Machine:
    """This machine. `mlx_device`: the device MLX computes on, as the plan names it."""
    return Machine(
        platform=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cpu_count=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        mlx_device=mlx_device,
    )


def describe_versions() -> Versions:
    """What runs here."""
    return Versions(qwisp=qwisp.__version__, mlx=version("mlx"), python=platform.python_version())


def describe_source() -> Source | None:
    """The commit of the checkout that holds this package; None when it is not in one of its own."""
    package = Path(qwisp.__file__).resolve().parent
    # An installed package may lie below somebody else's repository: that one's commit says nothing.
    top = _output("git", "-C", str(package), "rev-parse", "--show-toplevel")
    if top is None or Path(top) != package.parent:
        return None
    commit = _output("git", "-C", top, "rev-parse", "HEAD")
    status = _output("git", "-C", top, "status", "--porcelain")
    if commit is None or status is None:
        return None
    return Source(commit=commit, is_dirty=bool(status))


def _processor() -> str:
    """The processor's trade name where the system tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    brand = _output("sysctl", "-n", "machdep.cpu.brand_string")
    return brand or platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    """What a command prints; None when it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
