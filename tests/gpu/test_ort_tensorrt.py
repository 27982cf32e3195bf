"""The graphs on ONNX Runtime's TensorRT provider, on a GPU; it is no target of the commands."""

from __future__ import annotations

from on_gpu import OrtChecks


class TestOrtTensorRT(OrtChecks):
    backend = "ort-tensorrt"
    provider = "TensorrtExecutionProvider"
