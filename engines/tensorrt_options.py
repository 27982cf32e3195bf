"""What a user may choose of a TensorRT build, and what each library makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adx.engines.tensorrt_library import TensorRTLibrary
from adx.engines.tensorrt_log import BuildLog
from adx.export.errors import UsageError

OPT_LEVELS = range(6)


@dataclass(frozen=True)
class BuildOptions:
    """What a user may choose of a build.

    Attributes:
        opt_level: 0 to 5, how long to look for faster kernels; None: the library's own (3). TensorRT for RTX builds
            the same at every level but 0, which leaves out fusions.
        workspace_bytes: most scratch memory of a kernel; None: what the GPU has.
        hardware_compatible: the plan also runs on other GPUs, from sm80 on.
        version_compatible: the plan also runs in later releases of the library; it holds their lean runtime.
        refit: the plan's weights can be exchanged.
        strip: the plan is written without weights, which must be put in before it runs.
        timing_cache: file of measured kernels, read if it is there and written after the build.
    """

    opt_level: int | None = None
    workspace_bytes: int | None = None
    hardware_compatible: bool = False
    version_compatible: bool = False
    refit: bool = False
    strip: bool = False
    timing_cache: Path | None = None


def check_options(library: TensorRTLibrary, options: BuildOptions) -> None:
    """Refuse, before any work, what this library cannot do.

    Raises:
        UsageError: with the reason, and what to do instead.
    """
    if options.opt_level is not None and options.opt_level not in OPT_LEVELS:
        raise UsageError(f"--opt-level {options.opt_level}: it is {OPT_LEVELS[0]} to {OPT_LEVELS[-1]}")
    if options.workspace_bytes is not None and not 1 <= options.workspace_bytes < 2**63:
        raise UsageError(f"--workspace {options.workspace_bytes}: it must be 1 byte to 2**63 bytes, as 1G")
    if library.target == "tensorrt-rtx":
        _check_rtx_options(library, options)
    for flag in _flags(options):
        if not hasattr(library.module.BuilderFlag, flag):
            raise UsageError(f"{library.name} cannot build this: it has no {flag}: leave the option out")


def _check_rtx_options(library: TensorRTLibrary, options: BuildOptions) -> None:
    """What TensorRT for RTX would take and not do, or fail at (tried with 1.7)."""
    if options.hardware_compatible:
        raise UsageError(f"--hardware-compatibility: {library.name} builds for each GPU apart: repeat --sm instead")
    if options.version_compatible:
        raise UsageError(
            f"--version-compatible: {library.name} has no lean runtime to put into a plan: build again for each release"
        )
    if options.timing_cache is not None:
        raise UsageError(
            f"--timing-cache: {library.name} measures no kernels when it builds, so nothing is kept: leave it out"
        )


def configure(library: TensorRTLibrary, config: Any, sm: str, options: BuildOptions, log: BuildLog) -> None:
    """Set up one build's configuration.

    Args:
        config: the builder's, as it made it.
        sm: compute capability, as `sm89`.

    Raises:
        UsageError: the library refuses an option, or the timing cache cannot be used.
    """
    module, before = library.module, len(log.causes())
    if library.target == "tensorrt-rtx":
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(module.ComputeCapability, sm.upper()), 0)
    if options.opt_level is not None:
        config.builder_optimization_level = options.opt_level
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.hardware_compatible:
        config.hardware_compatibility_level = module.HardwareCompatibilityLevel.AMPERE_PLUS
    for flag in _flags(options):
        config.set_flag(getattr(module.BuilderFlag, flag))
    if options.timing_cache is not None:
        _read_timing_cache(library, config, options.timing_cache, log)
    if refused := log.causes()[before:]:  # a setter only logs that it sets nothing
        raise UsageError(f"{library.name} refuses an option: {'; '.join(refused)}: leave it out")


def _flags(options: BuildOptions) -> tuple[str, ...]:
    """Builder flags, as the library names them."""
    identical = options.strip and not options.refit  # the same weights come back, so every optimization is kept
    wanted = {
        "VERSION_COMPATIBLE": options.version_compatible,
        "REFIT": options.refit,
        "STRIP_PLAN": options.strip,
        "REFIT_IDENTICAL": identical,
    }
    return tuple(name for name, on in wanted.items() if on)


def _read_timing_cache(library: TensorRTLibrary, config: Any, path: Path, log: BuildLog) -> None:
    """Give the build what earlier ones measured, or an empty cache to fill.

    Raises:
        UsageError: the file is there and cannot be used; it is not written over.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UsageError(f"--timing-cache {path} cannot be read ({error.strerror}): name a file") from error
    cache = config.create_timing_cache(content)
    damaged = any("Failed to deserialize timing cache" in text for text in log.warnings)
    if cache is None or damaged or not config.set_timing_cache(cache, False):
        raise UsageError(
            f"--timing-cache {path} is damaged, or was written for another GPU or another release than {library.name}: "
            "delete it, or name another file"
        )
