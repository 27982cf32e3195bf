"""Plans of TensorRT on a GPU."""

from __future__ import annotations

from on_gpu import PlanChecks


class TestTensorRT(PlanChecks):
    backend = "tensorrt"
