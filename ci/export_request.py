"""What an export is asked for, and what it gives, as frozen values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from adx.calibration.activations import Method
from adx.engines.tensorrt import PlanRequest
from adx.export.spec import Precision

ORT_CPU = "ort-cpu"
ORT_CUDA = "ort-cuda"
TENSORRT = ("tensorrt", "tensorrt-rtx")
STATIC = (*TENSORRT, ORT_CUDA)  # targets that run the graphs over a preallocated cache
PORTABLE_OPSET = 23
ALGORITHMS = {"int8": "smoothquant", "int4": "gptq"}  # the default of each quantized precision


@dataclass(frozen=True)
class ExportRequest:
    """What to export, and how.

    Attributes:
        model: a Hugging Face folder, a hub id or a .gguf file.
        out: the bundle's folder.
        precision: of the weights.
        targets: engines to compile.
        max_batch_size: rows that the engine shall accept at most; None: no bound.
        max_input_len: tokens of a prompt; None: as many as the sequence may have.
        max_seq_len: tokens of prompt and reply together; None: the model's context.
        quant_algo: `rtn` (round to nearest), `smoothquant`, `awq` or `gptq`; None: what suits the precision.
        smooth_quant_alpha: share of the outliers that SmoothQuant moves into the weights, for all layers; `auto`: for
            each the one that leaves the least error in its output; None: 0.6.
        clip: at int4 with `rtn` or `smoothquant`, clip ranges where that leaves less error.
        symmetric: at int4 and int8, without or with zero points; None: what suits the precision and the target.
        weights_only: at int8 on TensorRT targets, leave activations in float16.
        calib_data: text to calibrate on; None: the model writes it.
        calib_size: samples at most; None: what suits the data.
        calib_seq_len: tokens of a sample; None: the same.
        calib_method: how scales of activations are chosen.
        calib_cache: folder that keeps statistics for later exports; None: for this one only.
        max_ppl_increase: largest increase of perplexity that is accepted, as a part: 0.05 for 5 %; None: the
            precision's own bound.
        max_kl: largest mean KL divergence, in nats; None: the precision's own bound.
        uniform: keep every layer at the precision asked for, whatever that costs.
        group_size: weights that share a scale, -1 for whole rows; None: what suits each layer.
        nodes_to_exclude: regular expressions of layers that stay in float.
        plans: how TensorRT builds.
        build: compile TensorRT plans now; otherwise the bundle holds what they are compiled from (`adx compile`).
        keep_onnx: put the portable graphs in the bundle.
        full_logits: the portable prefill graph keeps the logits of all positions.
        task: accepted for callers that name it; text generation is the only one.
        opset: of the portable graphs.
        atol: largest absolute logit error, in place of the precision's own bound.
        rtol: the same, as a part of the reference's logit range.
        trust_remote_code: let the checkpoint's own Python code run.
        offline: never contact the hub.
        seed: of the text that the model writes to be calibrated on, and of the rows that parity compares.
        force: replace a bundle that is there.
        allow_parity_failure: keep a bundle that misses its bounds.
        threads: of the engine and of PyTorch in the comparison; None: what this process may use.
    """

    model: str
    out: Path
    precision: Precision
    targets: tuple[str, ...] = (ORT_CPU,)
    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    quant_algo: str | None = None
    smooth_quant_alpha: float | Literal["auto"] | None = None
    clip: bool = False
    symmetric: bool | None = None
    weights_only: bool = False
    calib_data: Path | None = None
    calib_size: int | None = None
    calib_seq_len: int | None = None
    calib_method: Method = "minmax"
    calib_cache: Path | None = None
    max_ppl_increase: float | None = None
    max_kl: float | None = None
    uniform: bool = False
    group_size: int | None = None
    nodes_to_exclude: tuple[str, ...] = ()
    plans: PlanRequest = field(default_factory=PlanRequest)
    build: bool = True
    keep_onnx: bool = False
    full_logits: bool = False
    task: str | None = None
    opset: int | None = None
    atol: float | None = None
    rtol: float | None = None
    trust_remote_code: bool = False
    offline: bool = False
    seed: int = 0
    force: bool = False
    allow_parity_failure: bool = False
    threads: int | None = None
    command: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv))

    @property
    def algorithm(self) -> str | None:
        """The quantization algorithm in force; None for float."""
        return None if self.precision not in ALGORITHMS else self.quant_algo or ALGORITHMS[self.precision]

    @property
    def static(self) -> bool:
        """Whether its targets run the graphs over a preallocated cache."""
        return any(target in STATIC for target in self.targets)

    @property
    def quantizes_activations(self) -> bool:
        """Whether activations get static scales."""
        return bool(self.plan_targets) and self.precision == "int8" and not self.weights_only

    @property
    def bound(self) -> str:
        """The row of the parity table that the bundle must keep."""
        return "int8-activations" if self.quantizes_activations else self.precision

    @property
    def clips(self) -> bool:
        """Whether ranges of 4-bit weights are clipped."""
        return self.precision == "int4" and (self.clip or self.algorithm in ("awq", "gptq"))

    @property
    def calibrates(self) -> bool:
        """Whether anything is measured on samples."""
        return self.static or self.clips or self.algorithm not in (None, "rtn")

    @property
    def plan_targets(self) -> tuple[str, ...]:
        """Its targets that need plans."""
        return tuple(target for target in self.targets if target in TENSORRT)


@dataclass(frozen=True)
class ExportResult:
    """What an export gave. Without `passed` the bundle is there only if the request allowed a parity failure."""

    bundle: str
    passed: bool
    seconds: float
    peak_rss_mb: float
    bytes: int
    targets: tuple[str, ...]
    parity: Mapping[str, Any]
    summary: tuple[str, ...]


@dataclass(frozen=True)
class ExportPlan:
    """What an export would do, and roughly what it would take."""

    lines: tuple[str, ...]
    disk_bytes: int
    memory_bytes: int
    seconds: float
