"""One channel fifty times larger than the others: what it does to 8-bit activations, and what SmoothQuant saves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import models
import pytest

from adx.ci.pipeline import ExportRequest, export_bundle
from adx.cli.main import main
from adx.export.bundle import Bundle

CHANNEL, FACTOR = 5, 50
CALIBRATION = {"calib_size": 8, "calib_seq_len": 48}
BOUND = {"kl_mean": 0.03, "top1": 0.92, "perplexity_ratio": 1.03}  # of int8 with activations


def peaked(folder: Path, *, compensated: bool) -> Path:
    """A Llama of one layer whose embedding speaks for one next token, and whose layer has its say in it.

    The norms before attention and MLP make one channel `FACTOR` times larger; `compensated`, the layers after them
    take it back, so that the function is as without, and only one scale for all channels is too coarse.
    """
    import torch

    models.tiny_llama(folder, num_hidden_layers=1, vocab_size=64)
    model = models.load_model(folder)
    layer = model.model.layers[0]
    readers = {
        layer.input_layernorm: [getattr(layer.self_attn, f"{part}_proj") for part in "qkv"],
        layer.post_attention_layernorm: [layer.mlp.gate_proj, layer.mlp.up_proj],
    }
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))
        model.model.embed_tokens.weight *= 10
        for norm, linears in readers.items():
            norm.weight[CHANNEL] *= FACTOR
            for linear in linears if compensated else ():
                linear.weight[:, CHANNEL] /= FACTOR
    model.save_pretrained(folder)
    return folder


def request(model: Path, out: Path, **options: Any) -> ExportRequest:
    return ExportRequest(
        str(model), out, "int8", targets=("tensorrt-rtx",), build=False, threads=1, **CALIBRATION, **options
    )


def figures(parity: Mapping[str, Any]) -> tuple[float, float, float]:
    return parity["kl_mean"], parity["top1"], parity["perplexity_ratio"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outlier")


@pytest.fixture(scope="module")
def compensated(folder: Path) -> Path:
    return peaked(folder / "compensated", compensated=True)


def test_smoothquant_keeps_the_bound(compensated: Path, tmp_path: Path) -> None:
    """Measured: KL divergence 0.001 of 0.03 nats, 98 % of the top tokens; no layer was kept more precise for it."""
    result = export_bundle(request(compensated, tmp_path / "out"))
    kl_mean, top1, ratio = figures(result.parity)
    assert result.passed
    assert kl_mean <= BOUND["kl_mean"] / 6
    assert top1 >= 0.96
    assert ratio <= BOUND["perplexity_ratio"]
    layers = Bundle.open(tmp_path / "out").manifest.quantization.layers
    scaled = [layer.name for layer in layers if layer.scheme == "symmetric, activations too"]
    assert {name.rsplit(".", 1)[-1] for name in scaled} >= {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


def test_rounding_alone_misses_it(compensated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured: 0.28 nats, 79 % of the top tokens. Exit code 3, and no bundle unless that was allowed."""
    out = tmp_path / "out"
    options = ["--quant-algo", "rtn", "--uniform", "--no-build", "--calib-size", "8", "--calib-seq-len", "48"]
    args = ["export", str(compensated), "-o", str(out), "--int8", "--target", "tensorrt-rtx", *options]
    assert main([*args, "--threads", "1"]) == 3
    assert not out.exists()
    said = re.search(r"parity FAILED: KL ([\d.]+), top-1 ([\d.]+)", capsys.readouterr().out)
    assert said is not None
    assert float(said[1]) >= 4 * BOUND["kl_mean"]
    assert float(said[2]) <= 0.86


def test_a_channel_that_matters_is_saved_in_part(folder: Path, tmp_path: Path) -> None:
    """Uncompensated the channel carries most of the signal itself, so one scale for all loses less and smoothing saves
    less of it. Every layer's input in 8 bits; measured: 0.029 nats and 91 % of the top tokens with smoothing, 0.17 nats
    and 77 % without. Perplexity can fall by chance, so it is not compared."""
    model = peaked(folder / "uncompensated", compensated=False)
    options: dict[str, Any] = {"uniform": True, "allow_parity_failure": True}
    smooth = export_bundle(request(model, tmp_path / "smooth", **options))
    plain = export_bundle(request(model, tmp_path / "plain", quant_algo="rtn", **options))
    assert not plain.passed
    assert plain.parity["kl_mean"] >= 2 * BOUND["kl_mean"]
    assert plain.parity["top1"] <= 0.88
    assert plain.parity["kl_mean"] >= 3 * smooth.parity["kl_mean"]
    assert plain.parity["top1"] <= smooth.parity["top1"] - 0.05
