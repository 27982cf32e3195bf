"""The text of an export's calibration: the user's, or the model's own; kept in the bundle either way."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from adx.ci.built import Source
from adx.ci.export_request import ExportRequest
from adx.export.errors import UsageError
from adx.export.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from adx.calibration.samples import CalibrationSamples

FILE = "reports/calibration.json"


def check_calibration(request: ExportRequest, spec: ModelSpec) -> None:
    """What can be said of the calibration before any work.

    Raises:
        UsageError: the data is no text that can be read, or samples are longer than a sequence.
    """
    from adx.calibration.samples import check_data

    capacity = spec.kv_cache.capacity
    if request.calib_seq_len is not None and request.calib_seq_len > capacity:
        raise UsageError(
            f"--calib-seq-len {request.calib_seq_len}: a sequence of this export has 1 to {capacity} tokens"
        )
    if request.calib_data is not None:
        check_data(request.calib_data)


def calibration_samples(source: Source) -> CalibrationSamples:
    """Samples as the request asks for them, written to `reports/calibration.json`.

    Raises:
        UsageError: the calibration data cannot be used.
    """
    request, capacity = source.request, source.spec.kv_cache.capacity
    if request.calib_seq_len is not None and request.calib_seq_len > capacity:
        raise UsageError(
            f"--calib-seq-len {request.calib_seq_len}: a sequence of this export has 1 to {capacity} tokens"
        )
    if request.calib_data is None:
        samples = _written_by_model(source)
    else:
        source.report("reading calibration data", None)
        samples = _from_data(request, source.spec, source.folder, source.model.config)
    path = source.folder / FILE
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(samples.to_dict()) + "\n", encoding="utf-8")
    return samples


def check_samples(request: ExportRequest, spec: ModelSpec, folder: Path, config: PreTrainedConfig) -> None:
    """Whether calibration data has text enough for the model's tokenizer, before the weights are loaded.

    Raises:
        UsageError: it has not, or there is no tokenizer.
    """
    if request.calib_data is not None:
        _from_data(request, spec, folder, config)


def _written_by_model(source: Source) -> CalibrationSamples:
    from adx.calibration.samples import LENGTH, ROWS, write_samples

    request, stage = source.request, "letting the model write calibration text"
    source.report(stage, None)
    rows, length = request.calib_size or ROWS, request.calib_seq_len or LENGTH
    progress = partial(source.report, stage)
    return write_samples(source.model, seed=request.seed, rows=rows, length=length, progress=progress)


def _from_data(request: ExportRequest, spec: ModelSpec, folder: Path, config: PreTrainedConfig) -> CalibrationSamples:
    from adx.calibration.samples import DATA_LENGTH, DATA_ROWS, read_samples

    assert request.calib_data is not None
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise UsageError(
            f"--calib-data {request.calib_data}: the checkpoint has no tokenizer.json to read it with; leave the "
            "option out, and the model writes the calibration text itself"
        )
    bos = config.get_text_config().bos_token_id
    rows = request.calib_size or DATA_ROWS
    length = request.calib_seq_len or min(DATA_LENGTH, spec.kv_cache.capacity)
    begin = bos if isinstance(bos, int) else None
    return read_samples(request.calib_data, tokenizer, bos=begin, rows=rows, length=length)
