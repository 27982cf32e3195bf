"""`adx export`: a checkpoint becomes a bundle, verified against PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from adx.cli.command import AdxCommand, Values
from adx.cli.export_options import PRECISIONS, SECTIONS, SPELLING
from adx.cli.output import Output
from adx.cli.plan_options import PLAN_TARGETS, given_plan_options, plan_request
from adx.export.errors import ParityError, UsageError

if TYPE_CHECKING:
    from adx.ci.pipeline import ExportPlan, ExportRequest
    from adx.export.spec import Precision


def default_output(model: str, precision: str) -> Path:
    """The bundle's folder where none was named: the model's own name and the precision, in the current folder."""
    name = Path(model.rstrip("/")).resolve().name if Path(model).exists() else model.rstrip("/").split("/")[-1]
    return Path(f"{name.removesuffix('.gguf')}-{precision}")


def chosen_precision(values: Values) -> Precision:
    """The one precision that `--precision` and its shorthands name; float32 where none does.

    Raises:
        UsageError: they name more than one.
    """
    named = dict.fromkeys(name for name in PRECISIONS if values[name] or values["precision"] == name)
    if len(named) > 1:
        raise UsageError(
            f"more than one precision was asked for: {', '.join(named)}; name one of {', '.join(PRECISIONS)}"
        )
    return next(iter(named), "fp32")


def chosen_algorithm(values: Values) -> str | None:
    """The one algorithm that `--quant-algo`, its shorthands and SmoothQuant's own option name, or None.

    Raises:
        UsageError: they name more than one.
    """
    named = {
        f"--quant-algo {values['quant_algo']}": values["quant_algo"],
        "--awq": "awq" if values["awq"] else None,
        "--gptq": "gptq" if values["gptq"] else None,
        "--smooth-quant-alpha": None if values["smooth_quant_alpha"] is None else "smoothquant",
    }
    given = {option: algorithm for option, algorithm in named.items() if algorithm}
    if len(set(given.values())) > 1:
        raise UsageError(f"more than one algorithm was asked for: {', '.join(given)}; name one")
    return next(iter(given.values()), None)


def chosen_model(values: Values) -> str:
    """The checkpoint, named as an argument or by `--model`.

    Raises:
        UsageError: it is named twice, or not at all.
    """
    named = dict.fromkeys(name for name in (values["checkpoint"], values["model"]) if name)
    if len(named) != 1:
        given = " and ".join(named) or "none"
        raise UsageError(
            f"name one MODEL, a folder, a hub id or a .gguf file, as argument or with --model: got {given}"
        )
    return str(next(iter(named)))


def check_applicable(values: Values, precision: str, targets: tuple[str, ...]) -> None:
    """Refuse options that would change nothing.

    Raises:
        UsageError: with the option and the reason.
    """
    _check_calibration(values, precision, targets)
    _check_plan_options(values, targets)
    if not values["keep_onnx"]:
        for option in ("opset", "full_logits"):
            if values[option]:
                spelled = option.replace("_", "-")
                raise UsageError(
                    f"--{spelled} changes the portable graphs only: add --keep-onnx to have them in the bundle"
                )


def _check_calibration(values: Values, precision: str, targets: tuple[str, ...]) -> None:
    scaled = precision == "int8" and not set(PLAN_TARGETS).isdisjoint(targets) and not values["weights_only"]
    if values["calib_method"] is not None and not scaled:
        raise UsageError(
            "--calib-method chooses static scales of activations, which only --int8 on tensorrt and tensorrt-rtx has, "
            "and not with --weights-only"
        )


def _check_plan_options(values: Values, targets: tuple[str, ...]) -> None:
    given = given_plan_options(values)
    if set(PLAN_TARGETS).isdisjoint(targets):
        if names := (*given, *(["--no-build"] if values["no_build"] else [])):
            raise UsageError(
                f"{names[0]} applies to plans, which {targets[0]} does not have: leave it out, or choose --target "
                f"{' or '.join(PLAN_TARGETS)}"
            )
    elif values["no_build"] and given:
        raise UsageError(
            f"{given[0]} says how plans are built, and --no-build builds none: give it to adx compile later"
        )


def request_from(values: Values) -> ExportRequest:
    """What to export, from the options.

    Raises:
        UsageError: options that contradict each other or have no effect.
    """
    precision, model = chosen_precision(values), chosen_model(values)
    targets = tuple(dict.fromkeys(values["target"]))
    check_applicable(values, precision, targets)
    from adx.ci.pipeline import ExportRequest
    from adx.ci.quantization_options import check_quantization

    request = ExportRequest(
        model=model,
        out=values["output"] or default_output(model, precision),
        precision=precision,
        targets=targets,
        max_batch_size=values["max_batch_size"],
        max_input_len=values["max_input_len"],
        max_seq_len=values["max_seq_len"],
        quant_algo=chosen_algorithm(values),
        smooth_quant_alpha=values["smooth_quant_alpha"],
        clip=values["clip"],
        symmetric=values["symmetric"],
        weights_only=values["weights_only"],
        calib_data=values["calib_data"],
        calib_size=values["calib_size"],
        calib_seq_len=values["calib_seq_len"],
        calib_method=values["calib_method"] or "minmax",
        calib_cache=values["calib_cache"],
        max_ppl_increase=values["max_ppl_increase"],
        max_kl=values["max_kl"],
        uniform=values["uniform"],
        group_size=values["group_size"],
        nodes_to_exclude=values["nodes_to_exclude"],
        plans=plan_request(values),
        build=not values["no_build"],
        keep_onnx=values["keep_onnx"],
        full_logits=values["full_logits"],
        task=values["task"],
        opset=values["opset"],
        atol=values["atol"],
        rtol=values["rtol"],
        trust_remote_code=values["trust_remote_code"],
        offline=values["offline"],
        seed=values["seed"],
        force=values["force"],
        allow_parity_failure=values["allow_parity_failure"],
        threads=values["threads"],
    )
    check_quantization(request)
    return request


def run(values: Values, output: Output) -> int:
    """Export, or say what would be exported."""
    request = request_from(values)
    from adx.ci import pipeline

    if values["dry_run"]:
        plan = pipeline.plan_export(request)
        output.result(plan, plan_lines(plan))
        return 0
    result = pipeline.export_bundle(request, output.report)
    output.result(result, result.summary)
    if result.passed:
        return 0
    if request.allow_parity_failure:
        output.note("adx: parity failed, and the bundle was kept as --allow-parity-failure asks")
        return 0
    misses = result.parity.get("misses") or ("see the figures",)
    output.error(f"parity failed: {'; '.join(misses)}")
    return ParityError.exit_code


def plan_lines(plan: ExportPlan) -> list[str]:
    """An export that was not run, for people."""
    return [
        *plan.lines,
        f"disk:   {plan.disk_bytes / 1e6:,.0f} MB",
        f"memory: {plan.memory_bytes / 1e6:,.0f} MB at the peak",
        f"time:   {plan.seconds:,.0f} s on this machine",
    ]


command = AdxCommand(
    "export",
    run,
    help="""Export a checkpoint to a bundle and verify it against PyTorch.

    MODEL is a local Hugging Face folder (safetensors), a hub id, or a .gguf file. The bundle is complete or absent: it
    is written beside OUT and renamed when its parity with PyTorch float32 is proven (exit code 3 if it is not).""",
    arguments=[click.Argument(["checkpoint"], required=False, metavar="MODEL")],
    spelling=SPELLING,
    sections=SECTIONS,
)
