"""TensorRT or TensorRT for RTX: one module object, chosen once; both have the same Python API."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adx.engines.devices import gpus
from adx.export.errors import BackendError, UsageError

Target = Literal["tensorrt", "tensorrt-rtx"]

MINIMUM = (10, 14)  # the first TensorRT with attention and KV cache updates as layers of a network
NAMES: dict[Target, str] = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT for RTX"}
INSTALL: dict[Target, str] = {
    "tensorrt": "pip install 'tensorrt>=10.14'",
    "tensorrt-rtx": "pip install 'tensorrt-rtx-cu13-bindings==1.7.*' 'onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.*'",
}

# TensorRT for RTX has its Python API in one wheel, its shared libraries in another; they load in this order.
_RTX_MODULE = "tensorrt_rtx_bindings"
_RTX_LIBRARIES = "onnxruntime_ep_nv_tensorrt_rtx"
_CUDART = "libcudart.so"
_LOAD_ORDER = (_CUDART, "libtensorrt_rtx.so", "libtensorrt_onnxparser_rtx.so")
_CAPABILITY = re.compile(r"(?:sm_?)?(\d{1,2})\.?(\d)", re.IGNORECASE)


@dataclass(frozen=True)
class TensorRTLibrary:
    """A loaded library.

    Attributes:
        target: the target that it builds for.
        module: its Python module.
        version: as `1.7.1.116`.
        cuda: version of CUDA that it comes with, as `13.4` or `13`, or None where nothing tells.
    """

    target: Target
    module: Any
    version: str
    cuda: str | None

    @property
    def name(self) -> str:
        """The library and its version, for messages."""
        return f"{NAMES[self.target]} {self.version}"


def load_library(target: str, hint: str = "") -> TensorRTLibrary:
    """The library of a target; the first call loads it.

    Args:
        target: `tensorrt` or `tensorrt-rtx`.
        hint: the command that does the same on a host that has the library, for the message.

    Raises:
        BackendError: it is missing, broken or too old.
        UsageError: the target is another one.
    """
    if target not in NAMES:
        raise UsageError(f"{target!r} is no TensorRT target: there are {' and '.join(NAMES)}")
    try:
        return _load(target)
    except BackendError as error:
        elsewhere = f"; or run this on a host that has it: {hint}" if hint else ""
        raise BackendError(f"{error}{elsewhere}") from error


def capabilities(library: TensorRTLibrary) -> tuple[str, ...] | None:
    """Compute capabilities that the library builds for on any machine, as `sm89`; None: for the GPU that is present."""
    if library.target == "tensorrt":
        return None
    names = library.module.ComputeCapability.__members__
    numbers = sorted(int(name[2:]) for name in names if re.fullmatch(r"SM\d+", name))
    return tuple(f"sm{number}" for number in numbers)


def check_capability(library: TensorRTLibrary, sm: str | None) -> str:
    """The compute capability to build for, as `sm89`.

    Args:
        sm: as `sm89`, `89` or `8.9`; None: that of the GPU that is present.

    Raises:
        UsageError: it is none that the library builds for here.
        BackendError: a GPU is needed, and there is none.
    """
    accepted, local = capabilities(library), local_capability()
    wanted = local if sm is None else parse_capability(sm)
    if accepted is None:
        return _present(library, wanted, local)
    if wanted is None:
        raise UsageError(
            f"there is no GPU here to build for: say for which one with --sm; {library.name} builds for "
            f"{', '.join(accepted)}"
        )
    if wanted not in accepted:
        given = f"--sm {sm}" if sm is not None else f"the GPU here is {wanted}, which"
        raise UsageError(f"{given} is not accepted: {library.name} builds for {', '.join(accepted)}")
    return wanted


def parse_capability(text: str) -> str:
    """`sm89`, `sm_89`, `89` or `8.9` as `sm89`.

    Raises:
        UsageError: it is none of these.
    """
    match = _CAPABILITY.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--sm {text!r} is no compute capability: write it as sm89, 89 or 8.9")
    return f"sm{match[1]}{match[2]}"


def local_capability() -> str | None:
    """Compute capability of the first CUDA device, asked through the driver's own library; None without one."""
    return next((gpu.capability for gpu in gpus()), None)


def _present(library: TensorRTLibrary, wanted: str | None, local: str | None) -> str:
    """TensorRT measures kernels as it builds, so it builds for the GPU that it runs on."""
    if local is None:
        raise BackendError(
            f"{library.name} builds only on a machine with the GPU that the engine is for, and no CUDA device or "
            "driver was found here: run the same command there"
        )
    if wanted is not None and wanted != local:
        raise UsageError(
            f"--sm {wanted} cannot be built here: {library.name} builds for the GPU that is present, {local}; "
            "leave --sm out, or run the same command on a machine with that GPU"
        )
    return local


@functools.cache
def _load(target: Target) -> TensorRTLibrary:
    if target == "tensorrt":
        return _load_tensorrt()
    if importlib.util.find_spec("tensorrt_rtx") is not None:
        module = _import("tensorrt_rtx", target)
        return TensorRTLibrary(target, module, module.__version__, _cuda_of_package("tensorrt-rtx"))
    return _load_rtx_wheels()


def _load_tensorrt() -> TensorRTLibrary:
    target: Target = "tensorrt"
    module = _import("tensorrt", target)
    version = str(module.__version__)
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < MINIMUM:
        raise BackendError(
            f"TensorRT {version} is installed, and {'.'.join(map(str, MINIMUM))} or later is needed: {INSTALL[target]}"
        )
    return TensorRTLibrary(target, module, version, _cuda_of_package("tensorrt"))


def _load_rtx_wheels() -> TensorRTLibrary:
    target: Target = "tensorrt-rtx"
    spec = importlib.util.find_spec(_RTX_LIBRARIES)
    folder = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec else None
    if folder is None or importlib.util.find_spec(_RTX_MODULE) is None:
        raise BackendError(f"TensorRT for RTX is not installed: {INSTALL[target]}")
    cudart, *_ = [_shared_library(folder, stem) for stem in _LOAD_ORDER]
    module = _import(_RTX_MODULE, target)
    version, carried = str(module.__version__), _soname_version(folder, _LOAD_ORDER[1])
    if version.split(".")[:3] != carried.split(".")[:3]:
        raise BackendError(
            f"TensorRT for RTX does not fit together: its Python API is {version}, its library {carried}: "
            f"{INSTALL[target]}"
        )
    number = ctypes.c_int()
    cudart.cudaRuntimeGetVersion(ctypes.byref(number))
    return TensorRTLibrary(target, module, version, f"{number.value // 1000}.{number.value % 1000 // 10}")


def _shared_library(folder: Path, stem: str) -> ctypes.CDLL:
    """The package's shared library, its symbols open to those loaded after it."""
    try:
        return ctypes.CDLL(str(_library_file(folder, stem)), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise _broken("tensorrt-rtx", error) from error


def _library_file(folder: Path, stem: str) -> Path:
    found: Sequence[Path] = sorted(folder.glob(f"{stem}.*"))
    if not found:
        raise _broken("tensorrt-rtx", f"{stem} is not in {folder}")
    return found[-1]


def _soname_version(folder: Path, stem: str) -> str:
    return _library_file(folder, stem).name.removeprefix(f"{stem}.")


def _import(module: str, target: Target) -> Any:
    """A library's module; anything that keeps it from loading is named."""
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise BackendError(f"{NAMES[target]} is not installed: {INSTALL[target]}") from error
        raise _broken(target, error) from error
    except Exception as error:  # whatever a broken shared library raises
        raise _broken(target, error) from error
    if not hasattr(loaded, "Builder"):
        raise _broken(target, f"the module {module} has no Builder")
    return loaded


def _broken(target: Target, why: object) -> BackendError:
    words = " ".join(str(why).split())
    return BackendError(
        f"{NAMES[target]} is installed but does not load ({words}): install it again with {INSTALL[target]}"
    )


def _cuda_of_package(name: str) -> str | None:
    """CUDA's major version out of the name of the installed distribution, as `tensorrt-cu13`."""
    for cuda in ("13", "12"):
        for distribution in (f"{name}-cu{cuda}", f"{name}-cu{cuda}-bindings"):
            try:
                importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            return cuda
    return None
