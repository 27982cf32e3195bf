"""Which builder makes an export's engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adx.ci.export_request import ALGORITHMS, ORT_CUDA

if TYPE_CHECKING:
    from adx.ci.built import Builder, Source
    from adx.ci.calibrated import Calibration


def make_builder(source: Source, calibration: Calibration) -> Builder:
    """The builder for an export's targets and precision."""
    from adx.ci.build_cpu import CpuBuilder
    from adx.ci.build_cuda import CudaBuilder
    from adx.ci.build_static import StaticBuilder

    request = source.request
    if not request.static:
        return CpuBuilder(source, calibration)
    in_blocks = ORT_CUDA in request.targets and request.precision in ALGORITHMS
    return CudaBuilder(source, calibration) if in_blocks else StaticBuilder(source, calibration)
