"""Which precisions and options go with which targets; checked before any work."""

from __future__ import annotations

from adx.ci.export_request import ORT_CPU, ORT_CUDA, STATIC, TENSORRT, ExportRequest
from adx.ci.quantization_options import check_quantization
from adx.export.errors import UsageError

_STATIC_PRECISIONS = {**dict.fromkeys(TENSORRT, ("fp16", "int8")), ORT_CUDA: ("fp16", "int8", "int4")}


def check_targets(request: ExportRequest) -> None:
    """Refuse combinations that no engine can be built for, and targets whose library is not here.

    Raises:
        UsageError: a precision that a target does not compute in, targets that do not share a bundle, or an option
            without effect.
        BackendError: a target's library or GPU is missing.
    """
    static = [target for target in request.targets if target in STATIC]
    if static and ORT_CPU in request.targets:
        raise UsageError(
            f"{ORT_CPU} and {static[0]} in one bundle: they run different graphs, quantized differently, and a bundle "
            "holds one parity report: export two bundles"
        )
    if ORT_CPU in request.targets and request.precision in ("fp16", "bf16"):
        raise UsageError(
            f"{request.precision} on ort-cpu: ONNX Runtime's CPU kernels compute attention, norms and matrix products "
            "in float32, so a 16-bit graph would be refused or converted at every node; choose --fp32, --int8 or --int4"
        )
    for target in static:
        accepted = _STATIC_PRECISIONS[target]
        if request.precision not in accepted:
            raise UsageError(
                f"{request.precision} on {target}: it is built in {' or '.join(f'--{name}' for name in accepted)}"
            )
    if ORT_CUDA in request.targets and request.plan_targets and request.precision != "fp16":
        raise UsageError(
            f"{request.precision} on {request.plan_targets[0]} and {ORT_CUDA} in one bundle: they store quantized "
            "weights differently, and a bundle holds one set of graphs: export two bundles"
        )
    _check_options(request)
    if request.build:
        for target in request.plan_targets:
            _prepare(request, target)


def _check_options(request: ExportRequest) -> None:
    from adx.engines.tensorrt import PlanRequest, check_shape_options

    check_quantization(request)
    shapes = (request.plans.min_shapes, request.plans.opt_shapes, request.plans.max_shapes)
    check_shape_options(shapes)
    if request.plans != PlanRequest() and not (request.plan_targets and request.build):
        raise UsageError(
            "--sm, shape overrides and the builder's options apply where TensorRT plans are built: name a TensorRT "
            "target, and leave --no-build out"
        )
    if not request.plan_targets and not request.build:
        raise UsageError("--no-build applies to TensorRT targets only")


def _prepare(request: ExportRequest, target: str) -> None:
    from adx.ci.compile_request import CompileRequest, compile_command
    from adx.engines.tensorrt import prepare

    elsewhere = compile_command(CompileRequest(request.out, (target,), plans=request.plans))
    prepare(target, request.plans, f"{elsewhere} (on a bundle that was exported here with --no-build)")
