"""How many CPUs this process may use: by its affinity and its control group, not by the host."""

from __future__ import annotations

import math
import os
from pathlib import Path

from adx.export.errors import UsageError

CGROUP = Path("/sys/fs/cgroup")


def usable_threads() -> int:
    """CPUs that this process can keep busy: its affinity, bounded by its cgroup's quota (rounded up); at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def check_threads(threads: object) -> None:
    """Refuse what is no number of threads: each one more than the machine has CPUs only waits for the others.

    Raises:
        UsageError: it is no whole number from 1 to the machine's CPUs.
    """
    most = max(os.cpu_count() or 1, usable_threads())
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= most:
        raise UsageError(f"threads: {threads!r} is not a whole number from 1 to {most}, the CPUs of this machine")


def cgroup_quota(root: Path = CGROUP, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPUs that the process's control groups (version 2 or 1) allow it on average, or None without a quota.

    The tightest quota between the process's own group and the root counts.
    """
    quotas = [_quota(folder) for folder in _folders(root, membership)]
    found = [quota for quota in quotas if quota is not None]
    return min(found) if found else None


def _folders(root: Path, membership: Path) -> list[Path]:
    """The process's groups and their ancestors, where they can be seen."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    folders = [root, root / "cpu"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root if not controllers else root / controllers
        if controllers and "cpu" not in controllers.split(","):
            continue
        for start in {base, root / "cpu"} if controllers else {base}:
            parts = [part for part in path.split("/") if part and part != ".."]
            folders += [start.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return folders


def _quota(folder: Path) -> float | None:
    for name in ("cpu.max", "cpu.cfs_quota_us"):
        try:
            words = (folder / name).read_text().split()
            if name == "cpu.cfs_quota_us":
                words += (folder / "cpu.cfs_period_us").read_text().split()
        except OSError:
            continue
        if len(words) == 2 and words[0] not in {"max", "-1"} and int(words[1]) > 0:
            return int(words[0]) / int(words[1])
    return None
