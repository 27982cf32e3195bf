"""What this machine is, and which backends can be used on it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adx.engines.devices import Gpu
from adx.export.errors import BackendError
from adx.runtime.threads import cgroup_quota, usable_threads

if TYPE_CHECKING:
    from adx.engines.tensorrt_library import Target

# Distributions that bring TensorRT, and TensorRT for RTX.
_DISTRIBUTIONS: dict[Target, tuple[str, ...]] = {
    "tensorrt": ("tensorrt", "tensorrt-cu12", "tensorrt-cu13"),
    "tensorrt-rtx": ("tensorrt-rtx", "tensorrt-rtx-cu13-bindings", "onnxruntime-ep-nv-tensorrt-rtx-cu13"),
}

# Instruction sets that matter to quantized kernels, by how /proc/cpuinfo spells them.
CPU_FEATURES = {
    "avx2": ("avx2",),
    "avx512": ("avx512f",),
    "vnni": ("avx512_vnni", "avx_vnni"),
    "bf16": ("avx512_bf16", "bf16"),
    "amx": ("amx_tile",),
    "neon": ("asimd",),
    "dotprod": ("asimddp",),
    "i8mm": ("i8mm",),
}


@dataclass(frozen=True)
class Cpu:
    """The processor, and how much of it this process may use.

    Attributes:
        model: as the system names it.
        features: of `CPU_FEATURES`, those it has.
        host: logical CPUs of the machine.
        affinity: those that this process may run on.
        quota: CPUs' worth of time that the cgroup grants, or None where it sets no limit.
        usable: threads that can really run at once, which is what engines use unless told otherwise.
    """

    model: str
    features: tuple[str, ...]
    host: int
    affinity: int
    quota: float | None
    usable: int


@dataclass(frozen=True)
class Backend:
    """A target, and whether this machine has what it needs.

    Attributes:
        target: its name.
        builds: whether adx can build for it here.
        runs: whether adx can run it here.
        builds_for: compute capabilities that plans can be built for here; empty where the target has no plans.
        versions: distributions of it that are installed.
        missing: what to do about it, in the order to do it; empty where it is usable.
    """

    target: str
    builds: bool
    runs: bool
    builds_for: tuple[str, ...]
    versions: dict[str, str]
    missing: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether it can be built and run here."""
        return self.builds and self.runs

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**vars(self), "usable": self.usable}


def cpu() -> Cpu:
    """The processor of this machine."""
    fields = _cpuinfo()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    host = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host
    return Cpu(
        model=fields.get("model name") or platform.processor() or platform.machine(),
        features=tuple(name for name, spellings in CPU_FEATURES.items() if flags.intersection(spellings)),
        host=host,
        affinity=affinity,
        quota=cgroup_quota(),
        usable=usable_threads(),
    )


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in reversed(lines) if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def memory_bytes() -> tuple[int, int]:
    """Bytes of memory of the machine, and those available now."""
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def disk_bytes(folder: Path) -> tuple[int, int]:
    """Bytes of the disk that holds `folder`, and those free."""
    usage = shutil.disk_usage(folder)
    return usage.total, usage.free


def installed(*distributions: str) -> dict[str, str]:
    """Those of the distributions that are installed, and their versions."""
    found = {}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def backends(devices: tuple[Gpu, ...]) -> tuple[Backend, ...]:
    """Every target of adx, and whether this machine with its `devices` has what it needs."""
    return (*_onnxruntime(devices), _tensorrt("tensorrt", devices), _tensorrt("tensorrt-rtx", devices))


def _onnxruntime(devices: tuple[Gpu, ...]) -> tuple[Backend, Backend]:
    """The graphs of both targets are built, and checked, with whatever ONNX Runtime there is."""
    versions = installed("onnxruntime", "onnxruntime-gpu")
    providers, broken = _providers()
    there = bool(providers)
    cuda = "CUDAExecutionProvider" in providers
    no_cuda = () if cuda else (broken or _extra("gpu"),)
    return (
        Backend("ort-cpu", there, there, (), versions, () if there else (broken or _extra("cpu"),)),
        Backend("ort-cuda", there, cuda and bool(devices), (), versions, (*no_cuda, *_no_device(devices))),
    )


def _tensorrt(target: Target, devices: tuple[Gpu, ...]) -> Backend:
    """A target with plans; loading its library is the only way to know that it loads."""
    from adx.engines.tensorrt_library import capabilities, load_library

    versions = installed(*_DISTRIBUTIONS[target], "cuda-bindings")
    try:
        library = load_library(target)
    except BackendError as error:
        return Backend(target, False, False, (), versions, (str(error), *_no_device(devices)))
    here = tuple(gpu.capability for gpu in devices[:1])
    anywhere = capabilities(library)
    builds_for = here if anywhere is None else anywhere
    missing = list(_no_device(devices))
    if here and here[0] not in builds_for:
        missing.append(f"{library.name} does not support {here[0]}, it is for {', '.join(builds_for)}")
    if "cuda-bindings" not in versions:
        missing.append("to run plans: pip install cuda-bindings")
    return Backend(target, bool(builds_for), not missing, builds_for, versions, tuple(missing))


def _no_device(devices: tuple[Gpu, ...]) -> tuple[str, ...]:
    return () if devices else ("no CUDA device or driver was found",)


def _extra(name: str) -> str:
    return f"pip install 'adx-toolchain[{name}]'"


def _providers() -> tuple[list[str], str | None]:
    """ONNX Runtime's execution providers, and what keeps it from loading if it is installed but broken."""
    if importlib.util.find_spec("onnxruntime") is None:
        return [], None
    try:
        import onnxruntime
    except Exception as error:  # whatever a broken shared library raises
        return [], f"onnxruntime does not load: {error}"
    return list(onnxruntime.get_available_providers()), None
