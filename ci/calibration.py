"""The text of an export's calibration: the user's, or the model's own; kept in the bundle either way."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from adx.ci.built import Source
from adx.ci.export_request import ExportRequest
from adx.ci.progress import Report, quiet
from adx.export.errors import UsageError
from adx.export.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from adx.calibration.samples import CalibrationSamples

FILE = "reports/calibration.json"
FEW_ROWS = 16  # that the model writes where ranges are measured; second moments, which GPTQ takes, need more


def check_calibration(request: ExportRequest, spec: ModelSpec) -> None:
    """What can be said of the calibration before any work.

    Raises:
        UsageError: the data cannot be read, or samples are longer than a sequence, or of one token.
    """
    from adx.calibration.data_files import check_data

    capacity = spec.kv_cache.capacity
    if request.calib_seq_len is not None and not 2 <= request.calib_seq_len <= capacity:
        raise UsageError(
            f"--calib-seq-len {request.calib_seq_len}: a sample has 2 or more tokens, the first of which begins the "
            f"text, and a sequence of this export has 1 to {capacity} tokens"
        )
    if request.calib_data is not None:
        check_data(request.calib_data)


def check_samples(
    request: ExportRequest, spec: ModelSpec, folder: Path, config: PreTrainedConfig, report: Report = quiet
) -> None:
    """Read the calibration data, if there is any, before the weights are loaded, and keep what is drawn in `folder`.

    Raises:
        UsageError: none of it can be used, or there is no tokenizer.
    """
    if request.calib_data is not None:
        report("reading calibration data", None)
        _save(_from_data(request, spec, folder, config), folder)


def calibration_samples(source: Source) -> CalibrationSamples:
    """Samples as the request asks for them, which stand in `reports/calibration.json` from then on.

    Data that `check_samples` has read is not read again.

    Raises:
        UsageError: the calibration data cannot be used.
        CheckpointError: the model writes no text, because its logits are not finite.
    """
    from adx.calibration.samples import load_samples

    request, spec, folder = source.request, source.spec, source.folder
    samples = load_samples(folder / FILE, spec.vocab_size)
    if samples is None:
        if request.calib_data is None:
            samples = _written_by_model(source)
        else:
            source.report("reading calibration data", None)
            samples = _from_data(request, spec, folder, source.model.config)
        _save(samples, folder)
    source.report(samples.summary(), 1.0)
    return samples


def _save(samples: CalibrationSamples, folder: Path) -> None:
    path = folder / FILE
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(samples.to_dict(), allow_nan=False) + "\n", encoding="utf-8")


def _written_by_model(source: Source) -> CalibrationSamples:
    from adx.calibration.samples import LENGTH, ROWS, write_samples

    request, stage = source.request, "letting the model write calibration text"
    source.report(stage, None)
    rows = request.calib_size or (ROWS if request.algorithm == "gptq" else FEW_ROWS)
    length = request.calib_seq_len or min(LENGTH, source.spec.kv_cache.capacity)
    progress = partial(source.report, stage)
    return write_samples(source.model, seed=request.seed, rows=rows, length=length, progress=progress)


def _from_data(request: ExportRequest, spec: ModelSpec, folder: Path, config: PreTrainedConfig) -> CalibrationSamples:
    from adx.calibration.sources import Reader, read_samples

    assert request.calib_data is not None
    bos = config.get_text_config().bos_token_id
    begins = isinstance(bos, int) and 0 <= bos < spec.vocab_size
    reader = Reader(folder, bos if begins else None, spec.vocab_size, spec.kv_cache.capacity)
    return read_samples(
        request.calib_data, reader, seed=request.seed, rows=request.calib_size, length=request.calib_seq_len
    )
