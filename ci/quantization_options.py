"""Which options of quantization have an effect together; checked before any work."""

from __future__ import annotations

import math

from adx.ci.export_request import ALGORITHMS, ORT_CPU, ORT_CUDA, ExportRequest
from adx.export.errors import UsageError

_GPU_GROUPS = (16, 32, 64, 128)  # that ONNX Runtime's kernels on CUDA and TensorRT's for 4 bits have

_WHY_NOT_AT_INT8 = (
    "its 8-bit weights add little error beside that of the activations, which the kernel quantizes: --quant-algo "
    "smoothquant, the default, makes that smaller"
)


def check_quantization(request: ExportRequest) -> None:
    """Refuse what would have no effect, has no kernel, or contradicts something else that was asked for.

    Raises:
        UsageError: with the option, the reason, and what is possible.
    """
    _check_precision(request)
    if request.weights_only and not (request.plan_targets and request.precision == "int8"):
        raise UsageError(
            f"--weights-only applies to --int8 on TensorRT targets; {ORT_CPU} and {ORT_CUDA} store only weights in 8 "
            "bits anyway"
        )
    if request.algorithm is not None:
        _check_algorithm(request)
        _check_weights(request)
    _check_quality(request)
    _check_calibration(request)


def _check_precision(request: ExportRequest) -> None:
    given = {
        "--quant-algo": request.quant_algo,
        "--group-size": request.group_size,
        "--nodes-to-exclude": request.nodes_to_exclude,
        "--smooth-quant-alpha": request.smooth_quant_alpha is not None,
        "--clip": request.clip,
        "--symmetric and --asymmetric": request.symmetric is not None,
        "--max-ppl-increase": request.max_ppl_increase is not None,
        "--max-kl": request.max_kl is not None,
        "--uniform": request.uniform,
    }
    options = [option for option, on in given.items() if on]
    if options and request.algorithm is None:
        verb = "apply" if " and " in options[0] else "applies"
        raise UsageError(f"{options[0]} {verb} to --int8 and --int4 only, and the precision is {request.precision}")


def _check_algorithm(request: ExportRequest) -> None:
    algorithm, alpha = request.algorithm, request.smooth_quant_alpha
    accepted = _algorithms(request)
    if algorithm not in accepted:
        target = f"{request.targets[0]}{' --weights-only' if request.weights_only else ''}"
        reason = ""
        if algorithm in ("awq", "gptq") and not request.static:
            reason = f" {_WHY_NOT_AT_INT8};"
        elif algorithm == "awq":
            reason = " it is for weights alone, add --weights-only, and here activations are quantized too;"
        elif algorithm == "gptq" and request.plan_targets:
            reason = " it rounds to groups with a scale each, and TensorRT targets store 8 bits with one per channel;"
        elif algorithm == "gptq":
            reason = " rounding to 8 bits leaves it little to make up for;"
        raise UsageError(
            f"--quant-algo {algorithm} at {request.precision} on {target}:{reason} accepted are {', '.join(accepted)}"
        )
    if alpha is None:
        return
    if alpha != "auto" and not 0 <= alpha <= 1:
        raise UsageError(f"--smooth-quant-alpha {alpha}: a share of the outliers is 0 to 1")
    if algorithm != "smoothquant":
        raise UsageError(f"--smooth-quant-alpha is SmoothQuant's, and the algorithm is {algorithm}")
    if request.weights_only:
        raise UsageError(
            "--smooth-quant-alpha moves outliers of activations that are quantized, and --weights-only leaves them in "
            "float16: leave one of the two out"
        )


def _algorithms(request: ExportRequest) -> tuple[str, ...]:
    """Algorithms that do something for the precision on the target."""
    if request.precision == "int4":
        return ("rtn", "smoothquant", "awq", "gptq")
    weights_alone = request.static and not request.quantizes_activations
    return ("rtn", "smoothquant", "awq") if weights_alone else ("rtn", "smoothquant")


def _check_weights(request: ExportRequest) -> None:
    if request.clip and request.precision != "int4":
        raise UsageError("--clip applies to --int4: ranges of 8-bit weights always reach to the largest one")
    if request.clip and request.algorithm not in ("rtn", "smoothquant"):
        raise UsageError(f"--clip: {request.algorithm} clips ranges anyway; it applies to rtn and smoothquant")
    _check_zero_points(request)
    _check_groups(request)


def _check_zero_points(request: ExportRequest) -> None:
    if request.symmetric is None or not request.plan_targets:
        return
    raise UsageError(
        f"--symmetric and --asymmetric apply to {ORT_CPU} and {ORT_CUDA}: TensorRT targets store weights "
        "without zero points"
    )


def _check_groups(request: ExportRequest) -> None:
    size = request.group_size
    if size is None or not request.static:
        return
    if request.plan_targets:
        raise UsageError("--group-size: TensorRT targets store 8-bit weights with one scale per channel")
    if size not in _GPU_GROUPS:
        raise UsageError(
            f"--group-size {size} on {request.targets[0]}: its kernels take {', '.join(map(str, _GPU_GROUPS))}"
        )


def _check_quality(request: ExportRequest) -> None:
    budgets = {"--max-ppl-increase": request.max_ppl_increase, "--max-kl": request.max_kl}
    for option, value in budgets.items():
        if value is None:
            continue
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{option}: got {value}, accepted are finite numbers above 0")
        if request.uniform:
            raise UsageError(
                f"{option} is met by keeping layers more precise, and --uniform keeps none so: leave one of the two out"
            )
        if request.allow_parity_failure:
            raise UsageError(
                f"{option} says what may be lost, and --allow-parity-failure accepts any loss, so nothing would be "
                "searched: leave one of the two out"
            )


def _check_calibration(request: ExportRequest) -> None:
    if request.calib_method != "minmax" and not request.quantizes_activations:
        raise UsageError(
            "--calib-method chooses static scales of activations, which only --int8 on TensorRT targets has, and not "
            "with --weights-only"
        )
    given = {
        "--calib-data": request.calib_data,
        "--calib-size": request.calib_size,
        "--calib-seq-len": request.calib_seq_len,
        "--calib-cache": request.calib_cache,
    }
    options = [option for option, value in given.items() if value is not None]
    if options and not request.calibrates:
        advice = f"--quant-algo {ALGORITHMS[request.precision]}" if request.algorithm else "--int8 or --int4"
        raise UsageError(
            f"{options[0]} has no effect: {request.precision} with {request.algorithm or 'no quantization'} measures "
            f"nothing on samples; choose {advice}"
        )
    _check_cache(request)


def _check_cache(request: ExportRequest) -> None:
    cache = request.calib_cache
    if cache is None:
        return
    if not cache.is_dir() and cache.exists():
        raise UsageError(f"--calib-cache {cache} is a file: name a folder, which is made if it is not there")
    out = request.out.resolve()
    if cache.resolve() == out or out in cache.resolve().parents:
        raise UsageError(f"--calib-cache {cache} lies in the bundle's folder {request.out}: name one outside it")
