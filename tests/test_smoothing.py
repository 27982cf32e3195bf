"""SmoothQuant: nothing changes in float, ranges are what transformers' layers see, samples repeat from their seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from models import FAMILIES, load_model, tiny

from adx.calibration.ranges import input_ranges
from adx.calibration.samples import CalibrationSamples, write_samples
from adx.calibration.smoothing import smooth
from adx.export.checkpoint import resolve
from adx.export.checkpoint_spec import model_spec
from adx.export.linears import collect_linears
from adx.export.rotary import fold_rotary
from adx.export.trace import trace


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_moves_scales_and_keeps_every_product(family: str, tmp_path: Path) -> None:
    """Each smoothed layer's weight is its old one times one scale per column (rows divided where a projection took the
    next layer's division), the scale is the paper's formula, and layers behind a norm are among the smoothed."""
    folder = tiny(family, tmp_path / family)
    model = load_model(folder)
    checkpoint = resolve(str(folder))
    semantic = trace(model, model_spec(checkpoint, model.config).kv_cache)
    ranges = input_ranges(model, write_samples(model, seed=3, rows=2, length=16))
    graph = semantic.model.clone()
    fold_rotary(graph)
    layers = collect_linears(graph)
    before = {name: layer.weight().copy() for name, layer in layers.items()}
    smoothed = smooth(graph, layers, ranges)
    assert smoothed >= 2 * model.config.num_hidden_layers
    for name, layer in layers.items():
        columns = np.ones(layer.shape[1]) if layer.input_scale is None else layer.input_scale
        rows = np.ones(layer.shape[0]) if layer.output_scale is None else layer.output_scale
        np.testing.assert_allclose(layer.weight(), before[name] * rows[:, None] * columns, rtol=1e-5)
        if layer.input_scale is not None:
            assert np.exp(np.log(layer.input_scale).mean()) == pytest.approx(1, abs=1e-3)


def test_ranges_are_the_largest_magnitudes_of_each_channel(tmp_path: Path) -> None:
    """Against transformers' own hidden states: the head's input is the last hidden state."""
    model = load_model(tiny("llama", tmp_path / "ll"))
    rows = np.random.default_rng(0).integers(3, 256, (3, 9))
    ranges = input_ranges(model, CalibrationSamples("test", 0, rows))
    with torch.no_grad():
        hidden = model(torch.from_numpy(rows), output_hidden_states=True).hidden_states[-1]
    np.testing.assert_allclose(ranges["lm_head"], hidden.abs().amax((0, 1)).numpy(), rtol=1e-4)


def test_samples_repeat_from_their_seed(tmp_path: Path) -> None:
    """The same seed writes the same text, another one another; rows begin with the beginning-of-text token."""
    model = load_model(tiny("llama", tmp_path / "ll"))
    first, again, other = (write_samples(model, seed=seed, rows=2, length=12) for seed in (1, 1, 2))
    assert first.sha256 == again.sha256 != other.sha256
    assert first.tokens.shape == (2, 13)
    assert (first.tokens[:, 0] == model.config.bos_token_id).all()
