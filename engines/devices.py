"""CUDA devices, asked through the driver's own library: no package is needed for it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A CUDA device, as its driver names it, and its compute capability, as `sm89`."""

    name: str
    capability: str


def gpus() -> tuple[Gpu, ...]:
    """The devices that the driver shows, the first one first; none where there is no driver."""
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
