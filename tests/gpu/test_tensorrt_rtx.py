"""Plans of TensorRT for RTX on a GPU."""

from __future__ import annotations

from on_gpu import PlanChecks


class TestTensorRTForRTX(PlanChecks):
    backend = "tensorrt-rtx"
