"""Observers over the float model: exact whatever the order, the same after a stop, and small whatever the samples."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from adx.calibration.activations import METHODS, HistogramObserver, NoiseObserver, quantize_inputs
from adx.calibration.forward import run_observed
from adx.calibration.hessians import HessianObserver
from adx.calibration.histograms import (
    Histogram,
    entropy_reach,
    histogram_of,
    merged,
    minmax_reach,
    mse_reach,
    percentile_reach,
)
from adx.calibration.ranges import LayerRange, RangeObserver, layer_ranges
from adx.calibration.statistics import StatisticsStore, collect, statistics_key
from adx.export.errors import CheckpointError, Interrupted
from adx.export.interrupt import interruptible

Floats = NDArray[np.float32]
Rows = list[NDArray[np.int64]]

# Histograms.


def counted(values: NDArray[Any]) -> tuple[int, NDArray[np.int64]]:
    """Exponent and counts from the definition, a value at a time, by integers."""
    exponent = -100
    while values.size and max(map(float, values)) >= 2.0**exponent:
        exponent += 1
    counts = np.zeros(2048, np.int64)
    for value in map(float, values):
        numerator, denominator = value.as_integer_ratio()
        counts[numerator * 2 ** max(11 - exponent, 0) // (denominator * 2 ** max(exponent - 11, 0))] += 1
    return exponent, counts


def same(one: Histogram, other: Histogram) -> bool:
    return (one.exponent, one.largest) == (other.exponent, other.largest) and (one.counts == other.counts).all()


magnitudes = st.lists(
    st.one_of(
        st.floats(0, 3.4028234663852886e38, width=32),
        st.floats(0, 8, width=32),
        st.sampled_from([0.0, 1e-45, 0.5, 1.0, 2.0, float(np.nextafter(np.float32(2), np.float32(0)))]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(magnitudes, st.randoms(use_true_random=False))
def test_a_histogram_depends_on_the_values_alone(values: list[float], random: Any) -> None:
    """Whatever their order and however they come in groups: equal to the last count."""
    every = np.array(values, np.float32)
    whole = histogram_of(every)
    exponent, counts = counted(every)
    assert whole.exponent == exponent
    np.testing.assert_array_equal(whole.counts, counts)
    assert whole.largest == every.max()
    shuffled = random.sample(values, len(values))
    cuts = sorted(random.choices(range(len(values) + 1), k=3))
    parts = [histogram_of(np.array(shuffled[a:b], np.float32)) for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    left = merged(merged(merged(parts[0], parts[1]), parts[2]), parts[3])
    right = merged(parts[3], merged(parts[2], merged(parts[1], parts[0])))
    assert same(left, whole)
    assert same(right, whole)


def distributions() -> dict[str, Floats]:
    rng = np.random.default_rng(3)
    normal = np.abs(rng.standard_normal(20000))
    return {
        "normal": normal,
        "heavy tail": np.abs(rng.standard_t(3, 20000)),
        "outliers": np.concatenate([normal, [40.0, 55.0, 61.0]]),
        "a massive outlier": np.concatenate([normal, [3000.0]]),
        "uniform": rng.uniform(0, 1, 20000),
        "half zeros": np.concatenate([normal, np.zeros(20000)]),
        "few values": np.array([0.1, 0.5, 3.0]),
        "all the same": np.full(100, 1.5),
    }


@pytest.fixture(params=distributions())
def values(request: pytest.FixtureRequest) -> Floats:
    return distributions()[request.param].astype(np.float32)


def width(histogram: Histogram) -> float:
    return 2.0**histogram.exponent / 2048


def candidates(histogram: Histogram) -> range:
    return range(128, int(np.flatnonzero(histogram.counts)[-1]) + 2)


def divergence(counts: NDArray[np.int64], end: int) -> float:
    """Migacz's pseudo-code for one candidate, with sums as it writes them."""
    reference = counts[:end].astype(np.float64)
    reference[-1] += counts[end:].sum()
    level = np.arange(end) * 128 // end
    sums = np.bincount(level, counts[:end], 128)
    filled = np.bincount(level, counts[:end] > 0, 128)
    spread = np.where(counts[:end] > 0, (sums / np.maximum(filled, 1))[level], 0)
    if not spread.any():
        return np.inf
    p, q = reference / reference.sum(), spread / spread.sum()
    inside = p > 0
    return np.inf if (q[inside] == 0).any() else float((p[inside] * np.log(p[inside] / q[inside])).sum())


def test_entropy_finds_the_least_divergence(values: Floats) -> None:
    histogram = histogram_of(values)
    ends = candidates(histogram)
    found = [divergence(histogram.counts, end) for end in ends]
    reach = entropy_reach(histogram)
    chosen = ends[-1] if reach == values.max() else round(reach / width(histogram))
    assert found[chosen - 128] == pytest.approx(min(found), rel=1e-9, abs=1e-12)
    assert reach == pytest.approx(min(chosen * width(histogram), values.max()), rel=1e-12)


def squared_error(histogram: Histogram, reach: float) -> float:
    centres = np.minimum((np.arange(2048) + 0.5) * width(histogram), histogram.largest)
    step = reach / 127
    return float((histogram.counts * np.square(np.minimum(np.rint(centres / step), 127) * step - centres)).sum())


def test_mse_finds_the_least_squared_error(values: Floats) -> None:
    """On the values themselves it is no more than 2 % above the best of the candidates: centres stand for bins."""
    histogram = histogram_of(values)
    reaches = [min(end * width(histogram), histogram.largest) for end in candidates(histogram)]
    found = [squared_error(histogram, reach) for reach in reaches]
    reach = mse_reach(histogram)
    assert reach in reaches
    assert squared_error(histogram, reach) == pytest.approx(min(found), rel=1e-6, abs=1e-9)

    def true_error(top: float) -> float:
        return float(np.square(np.minimum(np.rint(values / (top / 127)), 127) * (top / 127) - values).mean())

    if len(values) > 1000 and values.max() < 1000:
        assert true_error(reach) <= 1.02 * min(map(true_error, reaches))


@pytest.mark.parametrize("share", [0.5, 0.99, 0.9999, 1.0])
def test_the_percentile_is_numpys_to_one_bin(values: Floats, share: float) -> None:
    histogram = histogram_of(values)
    wanted = float(np.quantile(values, share, method="inverted_cdf"))
    reach = percentile_reach(histogram, share)
    assert wanted <= reach <= wanted + width(histogram)
    assert minmax_reach(histogram) == values.max() == percentile_reach(histogram, 1.0)


def test_methods_tell_distributions_apart() -> None:
    """Three values of 20,003 far out: minmax reaches to them and entropy to where the others end. To cut all three at
    12 would cost a mean square of 0.27, to round in steps of 61 / 127 costs 0.02: so mse leaves them nearly whole. A
    normal tail is hardly cut by any."""
    outliers = histogram_of(distributions()["outliers"].astype(np.float32))
    assert minmax_reach(outliers) == 61
    assert 4 <= entropy_reach(outliers) < 5
    assert 50 < mse_reach(outliers) < 61
    assert 40 <= percentile_reach(outliers) < 40.1
    normal = histogram_of(distributions()["normal"].astype(np.float32))
    assert all(3 < reach(normal) <= minmax_reach(normal) for reach in (entropy_reach, mse_reach, percentile_reach))


@pytest.mark.parametrize("values", [[0.0], [], [0.0, 1e-40]], ids=["zero", "none", "denormal"])
def test_nothing_to_reach_for(values: list[float]) -> None:
    histogram = histogram_of(np.array(values, np.float32))
    for reach in (minmax_reach, percentile_reach, entropy_reach, mse_reach):
        assert reach(histogram) == histogram.largest == (np.float32(max(values)) if values else 0)


# Rows through the model.


def rows(*lengths: int, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 256, length) for length in lengths]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load_model(models.tiny_llama(tmp_path_factory.mktemp("observers") / "llama"))


def seen(model: Any, ids: Rows, chunk: int | None = None) -> dict[str, list[tuple[Floats, Floats]]]:
    """Inputs (tokens, in) and outputs of every call of every linear layer."""
    found: dict[str, list[tuple[Floats, Floats]]] = {}

    def keep(name: str, x: Any, y: Any) -> None:
        pair = (x.reshape(-1, x.shape[-1]).numpy().copy(), y.reshape(-1, y.shape[-1]).numpy().copy())
        found.setdefault(name, []).append(pair)

    run_observed(model, ids, keep, chunk=chunk)
    return found


def joined(pieces: list[tuple[Floats, Floats]]) -> Floats:
    return np.concatenate([x for x, _ in pieces])


@pytest.mark.parametrize("family", models.FAMILIES)
def test_pieces_over_the_cache_see_what_a_whole_row_sees(family: str, tmp_path: Path) -> None:
    """Rows of 24 tokens pass the windows of 8 and the 16 tokens where Phi-3's long rope begins, beyond which a cache
    of short frequencies would change keys."""
    model = models.load_model(models.tiny(family, tmp_path / family))
    ids = rows(24, 11)
    whole = seen(model, ids, chunk=24)
    assert len(whole) >= 8
    for chunk in (None, 1, 7):
        found = seen(model, ids, chunk)
        assert set(found) == set(whole)
        for name, pieces in found.items():
            np.testing.assert_allclose(joined(pieces), joined(whole[name]), rtol=1e-4, atol=1e-4, err_msg=name)


def test_both_phases_are_seen(model: Any) -> None:
    """By default a prefill of half a row and a decode of the other half on its past."""
    lengths = [len(x) for x, _ in seen(model, rows(9, 1, 4))["lm_head"]]
    assert lengths == [5, 4, 1, 2, 2]
    assert [len(x) for x, _ in seen(model, rows(9), chunk=4)["lm_head"]] == [4, 4, 1]


def test_a_model_with_a_recurrent_state_takes_rows_whole() -> None:
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=256, hidden_size=16, state_size=4, num_hidden_layers=1, time_step_rank=2)
    recurrent = MambaForCausalLM(config).eval()
    assert [len(x) for x, _ in seen(recurrent, rows(9, 4), chunk=2)["lm_head"]] == [9, 4]


def test_hooks_go_and_gradients_stay_off_after_an_error(model: Any) -> None:
    import torch

    def fail(name: str, x: Any, y: Any) -> None:
        assert not y.requires_grad
        raise RuntimeError(name)

    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with pytest.raises(RuntimeError, match="q_proj"):
        run_observed(model, rows(4), fail)
    assert torch.is_grad_enabled()
    assert not any(module._forward_hooks for module in model.modules())


# What observers measure.


def test_ranges_are_those_of_numpy(model: Any) -> None:
    ids = rows(12, 7, 20, 5)
    found = layer_ranges(model, ids)
    by_row = [seen(model, [row]) for row in ids]
    for name, layer in found.items():
        inputs = [joined(each[name]) for each in by_row]
        outputs = [np.concatenate([y for _, y in each[name]]) for each in by_row]
        every = np.concatenate(inputs)
        np.testing.assert_array_equal(layer.inputs, np.abs(every).max(0))
        np.testing.assert_allclose(layer.power, np.square(every, dtype=np.float64).mean(0), rtol=1e-6)
        assert layer.output == np.abs(np.concatenate(outputs)).max()
        average = np.abs(inputs[0]).max(0).astype(np.float64)
        for each in inputs[1:]:
            average = 0.9 * average + 0.1 * np.abs(each).max(0)
        assert layer.averages is not None
        np.testing.assert_allclose(layer.averages, average, rtol=1e-6)


def test_ranges_do_not_depend_on_how_samples_are_grouped(model: Any) -> None:
    """Exactly equal for any grouping of rows; to 1e-5 for pieces of 1 or 7 tokens and whole rows, since the float
    model's own sums differ in their last digits."""
    ids = rows(20, 9, 16, 33, 2)

    def two_by_two() -> Iterator[NDArray[np.int64]]:
        for start in range(0, len(ids), 2):
            yield from ids[start : start + 2]

    base = layer_ranges(model, ids)
    again = layer_ranges(model, two_by_two())
    for name, layer in base.items():
        for field in ("inputs", "power", "averages"):
            np.testing.assert_array_equal(getattr(again[name], field), getattr(layer, field))
        assert again[name].output == layer.output
    for chunk in (1, 7, 33):
        for name, layer in layer_ranges(model, ids, chunk=chunk).items():
            size = base[name].inputs.max()
            np.testing.assert_allclose(layer.inputs, base[name].inputs, rtol=1e-5, atol=1e-5 * size)
            np.testing.assert_allclose(layer.power, base[name].power, rtol=1e-5, atol=1e-5 * size**2)
            assert layer.output == pytest.approx(base[name].output, rel=1e-5)


def some_divisors(ranges: dict[str, LayerRange]) -> dict[str, Floats]:
    rng = np.random.default_rng(5)
    return {name: rng.uniform(0.2, 5, len(r.inputs)).astype(np.float32) for name, r in list(ranges.items())[::2]}


def test_every_method_gives_the_scale_of_its_definition(model: Any) -> None:
    ids = rows(24, 16, 9)
    ranges = layer_ranges(model, ids)
    divisors = some_divisors(ranges)
    pieces = [seen(model, [row]) for row in ids]
    found = {method: quantize_inputs(model, ids, ranges, divisors, method) for method in METHODS}
    for name in ranges:
        inverse = np.float32(1) / divisors.get(name, np.ones(1, np.float32))
        by_row = [np.abs(joined(each[name]) * inverse) for each in pieces]
        histogram = histogram_of(np.concatenate(by_row))
        average = float(by_row[0].max())
        for each in by_row[1:]:
            average = 0.9 * average + 0.1 * float(each.max())
        wanted = {
            "minmax": max(float(each.max()) for each in by_row),
            "moving-average": average,
            "percentile": percentile_reach(histogram),
            "entropy": entropy_reach(histogram),
            "mse": mse_reach(histogram),
        }
        assert set(wanted) == set(METHODS)
        for method in METHODS:
            assert found[method][name].scale == pytest.approx(wanted[method] / 127, rel=1e-6), method
            step = found[method][name].scale
            x = np.concatenate([joined(each[name]) * inverse for each in pieces]).astype(np.float64)
            error = np.square(np.clip(np.rint(x / step), -127, 127) * step - x).sum(1) / np.square(x).sum(1)
            assert found[method][name].noise == pytest.approx(error.mean(), rel=1e-3)


def test_progress_of_all_passes_rises_from_0_to_1(model: Any) -> None:
    ids = rows(4, 4)
    ranges = layer_ranges(model, ids)
    for method, wanted in (("minmax", [0, 0.5]), ("mse", [0, 0.25, 0.5, 0.75])):
        parts: list[float] = []
        quantize_inputs(model, ids, ranges, {}, method, parts.append)
        assert parts == wanted


def test_hessians_are_those_of_numpy_and_shared(model: Any) -> None:
    """Layers of one input have one matrix; all others have their own, though freed memory is used again."""
    ids = rows(20, 9, 31)
    names = [name for name in seen(model, ids) if name != "model.layers.1.mlp.gate_proj"]
    observer = HessianObserver(names)
    collect(model, ids, observer)
    found, inputs = observer.hessians(), seen(model, ids)
    assert set(found) == set(names)
    for name in names:
        x = joined(inputs[name]).astype(np.float64)
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], x.T @ x / len(x), rtol=1e-5, atol=1e-6 * np.square(x).mean())
    assert set(observer.tokens().values()) == {60}
    for index in range(2):
        q, k, v, o = (f"model.layers.{index}.self_attn.{part}_proj" for part in "qkvo")
        assert found[q] is found[k] is found[v]
        assert found[o] is not found[q]
    gate, up = (f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up"))
    assert found[gate] is found[up]
    assert len({id(each) for each in found.values()}) == 9, "four in each layer, and the head's"


def test_hessians_of_divided_inputs(model: Any) -> None:
    """Layers of one input that is divided differently share nothing."""
    ids = rows(20)
    q, k, v = (f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
    rng = np.random.default_rng(1)
    one, other = (rng.uniform(0.5, 2, 64).astype(np.float32) for _ in range(2))
    observer = HessianObserver([q, k, v], {q: one, k: one.copy(), v: other})
    collect(model, ids, observer)
    found, x = observer.hessians(), joined(seen(model, ids)[q]).astype(np.float64)
    assert found[q] is found[k]
    for name, divisor in ((q, one), (v, other)):
        np.testing.assert_allclose(found[name], (x / divisor).T @ (x / divisor) / len(x), rtol=1e-4, atol=1e-5)


def test_an_input_changed_in_place_is_another_input() -> None:
    """The same memory with other numbers in it, as a model that scales its hidden state in place has it."""
    import torch

    observer = HessianObserver(["a", "b"])
    x = torch.ones(3, 2)
    observer.observe("a", x, x)
    x.mul_(2)
    observer.observe("b", x, x)
    assert observer.hessians()["a"][0, 0] == 1
    assert observer.hessians()["b"][0, 0] == 4
    shared = HessianObserver(["a", "b"])
    shared.observe("a", x, x)
    shared.observe("b", x, x)
    shared.observe("a", x, x)
    with pytest.raises(CheckpointError, match="same input at first"):
        shared.observe("b", x.clone(), x)


@pytest.mark.parametrize("kind", ["ranges", "histograms", "noise", "hessians"])
def test_a_model_that_gives_nan_is_refused_by_layer(kind: str, tmp_path: Path) -> None:
    import torch

    broken = models.load_model(models.tiny_llama(tmp_path / "llama"))
    with torch.no_grad():
        broken.model.layers[1].post_attention_layernorm.weight[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"NaN or infinity.*layers\.1\.mlp\.(gate|up)_proj"):
        collect(broken, rows(5), observers(broken)[kind]())


# Statistics that are kept.


def observers(model: Any) -> dict[str, Callable[[], Any]]:
    import torch

    linear = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    rng = np.random.default_rng(5)
    divisors = {name: rng.uniform(0.2, 5, m.in_features).astype(np.float32) for name, m in linear.items()}
    return {
        "ranges": RangeObserver,
        "histograms": lambda: HistogramObserver(divisors),
        "noise": lambda: NoiseObserver(divisors, dict.fromkeys(linear, 0.05)),
        "hessians": lambda: HessianObserver(list(linear), dict(list(divisors.items())[:6])),
    }


def identical(one: Any, other: Any) -> bool:
    a, b = one.state(), other.state()
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and a[k].tobytes() == b[k].tobytes() for k in a)


class Stop:
    """Progress that raises before the nth row."""

    def __init__(self, at: int, error: BaseException | None = None) -> None:
        self.left, self.error, self.calls = at, error or KeyboardInterrupt(), 0

    def __call__(self, fraction: float) -> None:
        self.calls += 1
        if self.left == 0:
            raise self.error
        self.left -= 1


def refused(_text: str) -> None:
    raise AssertionError(_text)


@pytest.mark.parametrize("kind", ["ranges", "histograms", "noise", "hessians"])
def test_stopped_and_resumed_is_the_same_to_the_last_bit(model: Any, kind: str, tmp_path: Path) -> None:
    make, ids = observers(model)[kind], rows(12, 5, 20, 9, 17)
    straight = make()
    collect(model, ids, straight)
    for stops in ([1], [0, 3], [2, 1, 1], [4]):
        store = StatisticsStore(tmp_path / str(stops), refused)
        for at in stops:
            with pytest.raises(KeyboardInterrupt):
                collect(model, ids, make(), store=store, digest="m", progress=Stop(at))
        done, last = sum(stops), Stop(99)
        resumed = make()
        collect(model, ids, resumed, store=store, digest="m", progress=last)
        assert last.calls == 5 - done, "rows that were done are not run again"
        assert identical(resumed, straight)
        kept = make()
        collect(None, ids, kept, store=store, digest="m")  # type: ignore[arg-type]  # nothing may run
        assert identical(kept, straight)
        assert len(list((tmp_path / str(stops)).iterdir())) == 1


def test_what_fails_in_the_middle_of_a_row_does_not_count_it_twice(model: Any, tmp_path: Path) -> None:
    """Half of the third row is in the observer when its second piece fails: the state of two rows is what is kept."""
    ids, straight = rows(12, 5, 20, 9), RangeObserver()
    collect(model, ids, straight)
    store = StatisticsStore(tmp_path, refused)

    class Failing(RangeObserver):
        calls = 0

        def observe(self, name: str, x: Any, y: Any) -> None:
            self.calls += name == "lm_head"
            super().observe(name, x, y)
            if self.calls == 6:
                raise MemoryError

    with pytest.raises(MemoryError):
        collect(model, ids, Failing(), store=store, digest="m", save_every_s=0)
    rest, resumed = Stop(99), RangeObserver()
    collect(model, ids, resumed, store=store, digest="m", progress=rest)
    assert 2 <= rest.calls <= 3, "saved after the first row or the second"
    assert identical(resumed, straight)


def test_a_signal_waits_for_the_end_of_the_row(model: Any, tmp_path: Path) -> None:
    ids, straight = rows(12, 5, 20, 9), RangeObserver()
    collect(model, ids, straight)
    store = StatisticsStore(tmp_path, refused)

    class Signalled(RangeObserver):
        def observe(self, name: str, x: Any, y: Any) -> None:
            if x.shape[-2] == 3 and name.endswith("layers.1.mlp.up_proj"):  # in the second row
                os.kill(os.getpid(), signal.SIGTERM)
            super().observe(name, x, y)

    with pytest.raises(Interrupted), interruptible():
        collect(model, ids, Signalled(), store=store, digest="m")
    rest, resumed = Stop(99), RangeObserver()
    collect(model, ids, resumed, store=store, digest="m", progress=rest)
    assert rest.calls == 2
    assert identical(resumed, straight)


def test_killed_and_resumed_is_the_same_to_the_last_bit(model: Any, tmp_path: Path) -> None:
    """A process that is killed by a signal no program sees, and another that goes on with what it saved."""
    folder = models.tiny_llama(tmp_path / "llama")
    ids = rows(*[16] * 12)
    np.save(tmp_path / "ids.npy", np.array(ids))
    script = f"""
        import sys
        sys.path[:0] = {sys.path!r}
        from pathlib import Path
        import time
        import models, numpy as np
        from adx.calibration.ranges import RangeObserver
        from adx.calibration.statistics import StatisticsStore, collect
        model, ids = models.load_model(Path({str(folder)!r})), list(np.load({str(tmp_path / "ids.npy")!r}))
        collect(model, ids, RangeObserver(), store=StatisticsStore(Path({str(tmp_path / "kept")!r})), digest="m",
                progress=lambda fraction: time.sleep(0.5 * (fraction > 0.2)), save_every_s=0)
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=environment)
    try:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "kept").glob("*.npz")) and time.monotonic() < deadline:
            assert child.poll() is None
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    store, rest, resumed, straight = StatisticsStore(tmp_path / "kept", refused), Stop(99), *two(RangeObserver)
    collect(model, ids, resumed, store=store, digest="m", progress=rest)
    assert 0 < rest.calls < 12, "some rows were done"
    collect(model, ids, straight)
    assert identical(resumed, straight)
    assert not list((tmp_path / "kept").glob(".*")), "what the killed process left half written is gone"


def two(make: Callable[[], Any]) -> tuple[Any, Any]:
    return make(), make()


def test_each_thing_that_changes_the_result_changes_the_key(model: Any) -> None:
    ids = rows(4, 6)
    joined_rows = [np.concatenate(ids)]
    base = statistics_key("m", ids, "k", None)
    assert base == statistics_key("m", iter(ids), "k", None)
    others = [
        statistics_key("other", ids, "k", None),
        statistics_key("m", ids[::-1], "k", None),
        statistics_key("m", joined_rows, "k", None),
        statistics_key("m", ids, "other", None),
        statistics_key("m", ids, "k", 1),
    ]
    assert len({base, *others}) == 6
    one, other = np.ones(4, np.float32), np.full(4, 2, np.float32)
    kinds = [
        RangeObserver(),
        HistogramObserver({}),
        HistogramObserver({"a": one}),
        HistogramObserver({"a": other}),
        HistogramObserver({"b": one}),
        NoiseObserver({}, {"a": 1.0}),
        NoiseObserver({}, {"a": 2.0}),
        NoiseObserver({"a": other}, {"a": 1.0}),
        HessianObserver(["a"]),
        HessianObserver(["a", "b"]),
        HessianObserver(["a"], {"a": other}),
    ]
    assert len({each.kind for each in kinds}) == len(kinds)
    assert HessianObserver(["a", "b"]).kind == HessianObserver(["b", "a"]).kind


def some_arrays() -> dict[str, NDArray[Any]]:
    return {"a/b": np.arange(5.0), "names": np.array(["x", "yy"]), "file": np.array(3), "none": np.zeros((0, 4))}


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    store = StatisticsStore(tmp_path / "new", refused)
    assert store.load("ab") is None
    assert store.save("ab", some_arrays())
    found = store.load("ab")
    assert found is not None
    assert found.keys() == some_arrays().keys()
    for name, array in some_arrays().items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    assert not StatisticsStore().save("ab", some_arrays())
    assert StatisticsStore().load("ab") is None


def test_a_damaged_file_is_never_believed(tmp_path: Path) -> None:
    """Each byte flipped in turn, or the end cut off: what was saved, or nothing and a word about it."""
    notes: list[str] = []
    store = StatisticsStore(tmp_path, notes.append)
    arrays = {"a": np.arange(3.0)}
    store.save("ab", arrays)
    path = tmp_path / "ab.npz"
    content = path.read_bytes()
    ways = [content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :] for at in range(0, len(content), 2)]
    ways += [content[:at] for at in range(0, len(content), 37)]
    lost = 0
    for damaged in ways:
        path.write_bytes(damaged)
        notes.clear()
        found = store.load("ab")
        if found is None:
            lost += 1
            assert len(notes) == 1
            assert "computed again" in notes[0]
            assert str(path) in notes[0]
        else:
            assert found.keys() == arrays.keys()
            np.testing.assert_array_equal(found["a"], arrays["a"])
    assert lost > 0.7 * len(ways)


def test_a_foreign_file_is_never_believed(model: Any, tmp_path: Path) -> None:
    """Under its name: another key's file, someone else's arrays, pickled objects, a folder, arrays of another form."""
    notes: list[str] = []
    store = StatisticsStore(tmp_path, notes.append)
    store.save("ab", some_arrays())
    (tmp_path / "cd.npz").write_bytes((tmp_path / "ab.npz").read_bytes())
    np.savez(tmp_path / "ef.npz", a=np.zeros(3))
    np.savez(tmp_path / "01.npz", adx=np.array([print], object))
    (tmp_path / "23.npz").mkdir()
    for key in ("cd", "ef", "01", "23"):
        assert store.load(key) is None
    assert len(notes) == 4
    ids, made, straight = rows(4, 6), *two(RangeObserver)
    store.save(statistics_key("m", ids, made.kind, None), some_arrays())
    collect(model, ids, made, store=store, digest="m")
    collect(model, ids, straight)
    assert identical(made, straight)
    assert "another form" in notes[-1]


def test_a_store_that_cannot_be_written_says_so_and_stops_nothing(model: Any, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    notes: list[str] = []
    ids, made, straight = rows(4, 6), *two(RangeObserver)
    collect(model, ids, made, store=StatisticsStore(blocked, notes.append), digest="m")
    collect(model, ids, straight)
    assert identical(made, straight)
    assert any("cannot be saved" in note for note in notes)
    with pytest.warns(UserWarning, match="cannot be saved"):
        StatisticsStore(blocked).save("ab", {})


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    store = StatisticsStore(tmp_path, notes.append)
    store.save("ab", some_arrays())
    (tmp_path / ".ab.999999999.tmp").write_bytes(b"of a process that was killed")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not store.save("ab", {"a": np.zeros(1)})
    monkeypatch.undo()
    assert "No space left" in notes[0]
    assert [path.name for path in tmp_path.iterdir()] == ["ab.npz"]
    found = store.load("ab")
    assert found is not None
    assert found.keys() == some_arrays().keys()


def test_passes_of_a_calibration_are_taken_from_the_store(model: Any, tmp_path: Path) -> None:
    ids, store = rows(12, 9), StatisticsStore(tmp_path, refused)
    made = []
    for source in (model, None):
        ranges = layer_ranges(source, ids, store=store, digest="m")
        scales = quantize_inputs(source, ids, ranges, some_divisors(ranges), "entropy", store=store, digest="m")
        made.append((ranges["lm_head"].averages, scales))
    np.testing.assert_array_equal(made[0][0], made[1][0])
    assert made[0][1] == made[1][1]
    assert len(list(tmp_path.iterdir())) == 3


# Memory.

PEAK = """
    import resource, sys
    sys.path[:0] = {path!r}
    import numpy as np, torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from adx.calibration.activations import quantize_inputs
    from adx.calibration.ranges import layer_ranges
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                         num_attention_heads=4, max_position_embeddings=128)
    model = LlamaForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    for count in (16, 256):
        ids = list(rng.integers(3, 512, (count, 128)))
        ranges = layer_ranges(model, ids)
        if {method!r} != "minmax":
            quantize_inputs(model, ids, ranges, {{}}, {method!r})
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["minmax", "percentile"])
def test_256_samples_take_no_more_memory_than_16(method: str) -> None:
    script = textwrap.dedent(PEAK.format(path=sys.path, method=method))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    few, many = map(int, done.stdout.split())
    assert many <= 1.15 * few


def test_clearing_a_store_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    """Another file of the same form, and a folder where a file of the store should be, stay and are no error."""
    folder = tmp_path / "statistics"
    folder.mkdir()
    (folder / f"{'b' * 64}.npz").write_bytes(b"someone else's")
    store = StatisticsStore(folder)
    assert store.save("a" * 64, {"x": np.zeros(1)})
    assert store.load("c" * 64) is None
    (folder / f"{'c' * 64}.npz").mkdir()
    store.clear()
    assert sorted(path.name[0] for path in folder.iterdir()) == ["b", "c"]
    own = StatisticsStore(tmp_path / "own")
    assert own.save("a" * 64, {"x": np.zeros(1)})
    own.clear()
    assert not (tmp_path / "own").exists()
