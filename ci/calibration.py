"""The text of an export's calibration: the user's, or the model's own; kept in the bundle either way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from adx.ci.built import Source
from adx.ci.export_request import ExportRequest
from adx.export.errors import UsageError
from adx.export.spec import ModelSpec

if TYPE_CHECKING:
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
    samples = _written_by_model(source) if request.calib_data is None else _from_data(source)
    path = source.folder / FILE
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(samples.to_dict()) + "\n", encoding="utf-8")
    return samples


def _written_by_model(source: Source) -> CalibrationSamples:
    from adx.calibration.samples import LENGTH, ROWS, write_samples

    request = source.request
    source.report("letting the model write calibration text", None)
    rows, length = request.calib_size or ROWS, request.calib_seq_len or LENGTH
    return write_samples(source.model, seed=request.seed, rows=rows, length=length)


def _from_data(source: Source) -> CalibrationSamples:
    from adx.calibration.samples import DATA_LENGTH, DATA_ROWS, read_samples

    request = source.request
    assert request.calib_data is not None
    tokenizer = source.folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise UsageError(
            f"--calib-data {request.calib_data}: the checkpoint has no tokenizer.json to read it with; leave the "
            "option out, and the model writes the calibration text itself"
        )
    source.report("reading calibration data", None)
    bos = source.model.config.get_text_config().bos_token_id
    rows = request.calib_size or DATA_ROWS
    length = request.calib_seq_len or min(DATA_LENGTH, source.spec.kv_cache.capacity)
    begin = bos if isinstance(bos, int) else None
    return read_samples(request.calib_data, tokenizer, bos=begin, rows=rows, length=length)
