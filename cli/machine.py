"""What this machine is, and which backends can be used on it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from adx.cli.options import TARGETS
from adx.runtime.threads import cgroup_quota, usable_threads

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
class Gpu:
    """A CUDA device, as its driver names it, and its compute capability, as `sm89`."""

    name: str
    capability: str


@dataclass(frozen=True)
class Backend:
    """A target, and whether this machine has what it needs.

    Attributes:
        target: its name.
        usable: whether adx can build for it and run it here.
        versions: distributions of it that are installed.
        missing: what to do about it, in the order to do it; empty where it is usable.
    """

    target: str
    usable: bool
    versions: dict[str, str]
    missing: tuple[str, ...]


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


def gpus() -> tuple[Gpu, ...]:
    """CUDA devices that the driver shows, asked through its own library."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_gpu(driver, index) for index in range(count.value))


def _gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    name, major, minor = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetName(name, len(name), index)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, index)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, index)  # and ..._MINOR
    return Gpu(name.value.decode(errors="replace"), f"sm{major.value}{minor.value}")


def installed(*distributions: str) -> dict[str, str]:
    """Those of the distributions that are installed, and their versions."""
    found = {}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def backends(devices: tuple[Gpu, ...]) -> tuple[Backend, ...]:
    """Every target of adx, and whether this machine with its `devices` has what it needs."""
    runtimes = installed("onnxruntime", "onnxruntime-gpu")
    tensorrt = installed("tensorrt", "polygraphy")
    rtx = installed("tensorrt-rtx", "tensorrt-rtx-cu13-bindings", "onnxruntime-ep-nv-tensorrt-rtx-cu13", "polygraphy")
    no_device = () if devices else ("no CUDA device or driver was found",)
    providers, broken = _providers()
    needs = {
        "ort-cpu": (runtimes, () if providers else (broken or _extra("cpu"),)),
        "ort-cuda": (
            runtimes,
            (*(() if "CUDAExecutionProvider" in providers else (_extra("gpu"),)), *no_device),
        ),
        "tensorrt": (tensorrt, (*(() if "tensorrt" in tensorrt else (_extra("tensorrt"),)), *no_device)),
        "tensorrt-rtx": (
            rtx,
            (*(() if any("rtx" in name for name in rtx) else (_extra("tensorrt-rtx"),)), *no_device),
        ),
    }
    return tuple(_backend(target, *needs[target]) for target in TARGETS)


def _backend(target: str, versions: dict[str, str], missing: tuple[str, ...]) -> Backend:
    if not TARGETS[target]:
        missing = (f"this release of adx does not build {target} engines", *missing)
    return Backend(target, not missing, versions, missing)


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
