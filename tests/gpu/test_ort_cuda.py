"""The graphs on ONNX Runtime's CUDA provider, on a GPU."""

from __future__ import annotations

from on_gpu import CommandChecks, OrtChecks


class TestOrtCuda(OrtChecks, CommandChecks):
    backend = "ort-cuda"
    provider = "CUDAExecutionProvider"
