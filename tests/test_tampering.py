"""A bundle whose weights were changed: the files' hashes say so, and parity does where the hashes were made to fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from models import tiny_llama

from adx.cli.main import main
from adx.engines.ort_cpu import GRAPH_FILE, WEIGHTS_FILE
from adx.export.bundle import refresh_files

PRECISIONS = ("fp32", "int8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One layer and a vocabulary of 24: random logits this far apart pass the bounds of 8 bits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_llama(tmp_path_factory.mktemp("tampering") / "model", vocab_size=24, num_hidden_layers=1)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def clean(checkpoint: Path) -> dict[str, Path]:
    """A bundle of each precision, by the command line."""
    made = {precision: checkpoint.parent / precision for precision in PRECISIONS}
    for precision, out in made.items():
        assert main(["export", str(checkpoint), f"--{precision}", "-o", str(out), "--threads", "1", "-q"]) == 0
    return made


def negate(bundle: Path, name: str) -> None:
    """Flip the sign of a float tensor of the engine, in place."""
    import onnx

    tensors = onnx.load(bundle / GRAPH_FILE, load_external_data=False).graph.initializer
    (tensor,) = (t for t in tensors if t.name == name)
    kind = {onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.FLOAT16: np.float16}[tensor.data_type]
    place = {item.key: item.value for item in tensor.external_data}
    data = np.memmap(bundle / WEIGHTS_FILE, kind, "r+", int(place["offset"]), tuple(tensor.dims))
    assert data.any()
    data[:] = -data
    data.flush()


def negate_matrix(bundle: Path, precision: str) -> None:
    """Of the layer that maps the MLP back: its float weights, or its scales, as the same fault in whole blocks."""
    kind = "weight" if precision == "fp32" else "scales"
    negate(bundle, f"model.layers.0.mlp.down_proj.{kind}")


def verify(bundle: Path, checkpoint: Path, *options: str) -> int:
    return main(["verify", str(bundle), "--reference", str(checkpoint), "--threads", "1", *options])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_clean_bundle_passes(
    precision: str, clean: dict[str, Path], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(clean[precision], checkpoint, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is True
    kinds = {case["kind"] for case in result["parity"]["cases"]}
    assert {"prefill", "decode", "chunks", "greedy"} <= kinds
    shapes = {tuple(case["prefill"]) for case in result["parity"]["cases"]}
    assert len({len(rows) for rows in shapes}) >= 3  # batch sizes
    assert len({length for rows in shapes for length in rows}) >= 5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_flipped_sign_is_found_by_the_hashes(
    precision: str, clean: dict[str, Path], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The size is as before: the file's hash alone tells. The file is named; nothing is compared; no figures shown."""
    bundle = shutil.copytree(clean[precision], tmp_path / "bundle")
    negate_matrix(bundle, precision)
    assert verify(bundle, checkpoint) == 1
    said = capsys.readouterr()
    assert f"{WEIGHTS_FILE}: sha256 is" in said.err
    assert "passed" not in said.out
    assert main(["verify", str(bundle)]) == 1  # also without a reference
    assert WEIGHTS_FILE in capsys.readouterr().err


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_flipped_sign_with_fitting_hashes_is_found_by_parity(
    precision: str, clean: dict[str, Path], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a wrong export would be: every file is what the manifest says. The output that departs is named."""
    bundle = shutil.copytree(clean[precision], tmp_path / "bundle")
    negate_matrix(bundle, precision)
    refresh_files(bundle)
    assert verify(bundle, checkpoint, "--json") == 3
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result["passed"] is False
    assert result["parity"]["passed"] is False
    assert any("output logits" in miss for miss in result["parity"]["misses"])
    assert verify(bundle, checkpoint) == 3
    said = capsys.readouterr()
    assert "output logits" in said.out
    assert "does not compute what PyTorch computes" in said.err


def test_a_sign_flipped_back_passes(
    clean: dict[str, Path], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tests above fail for the sign and not for the handling."""
    bundle = shutil.copytree(clean["int8"], tmp_path / "bundle")
    negate_matrix(bundle, "int8")
    negate_matrix(bundle, "int8")
    assert verify(bundle, checkpoint) == 0
    capsys.readouterr()
