"""Parity: a faithful engine passes, and each kind of fault in an engine is found and located."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest

from adx.ci.bounds import BOUNDS, Bound, bound_of
from adx.ci.corpus import Corpus, load_corpus
from adx.ci.parity import ParityFigures, measure_parity
from adx.ci.reference import Reference
from adx.export.checkpoint_load import cache_argument
from adx.export.errors import CheckpointError, ParityError, UsageError
from adx.runtime.cache import KVCache

POSITIONS = 400


class CachedSession:
    """A `Session` over a transformers model and one KV cache per row: fast enough for a few hundred steps.

    Attributes:
        shift: added to the position of every token that is decoded, as an engine that miscounts its past would.
        reads_padding: prefill takes a row's logits at the padded end.
    """

    def __init__(self, model: Any, *, capacity: int | None = None, max_batch_size: int | None = None) -> None:
        self.model = model
        self.vocab_size = int(model.config.vocab_size)
        self.capacity = capacity or int(model.config.max_position_embeddings)
        self.max_batch_size = max_batch_size
        self.recompute_at: int | None = None
        self.two_graphs = False
        self.max_input_len: int | None = None
        self.provider, self.threads = "torch", 1
        self.shift = 0
        self.reads_padding = False
        self.biggest: tuple[int, int] = (0, 0)  # rows of a batch, tokens of a row

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        cache = KVCache([], np.zeros(batch_size, np.int64), capacity or self.capacity)
        assert self.max_batch_size is None or batch_size <= self.max_batch_size
        return cache

    def prefill(self, tokens: Any, lengths: Any, cache: KVCache, wanted: str = "last") -> Any:
        assert not cache.lengths.any()
        assert tokens.shape == (cache.batch_size, max(lengths))
        out = np.full((*tokens.shape, self.vocab_size), np.nan, np.float32)
        for row, length in enumerate(lengths):
            cache.bound.pop(str(row), None)
            length = tokens.shape[1] if self.reads_padding else length
            out[row, :length] = self._run(cache, row, tokens[row, :length], 0)
        cache.lengths[:] = lengths
        self._note(cache)
        ends = np.full_like(lengths, tokens.shape[1]) if self.reads_padding else lengths
        return out if wanted == "all" else out[np.arange(len(out)), ends - 1]

    def decode(self, tokens: Any, cache: KVCache) -> Any:
        starts = cache.lengths + self.shift
        out = np.stack([self._run(cache, row, tokens[row], int(starts[row])) for row in range(len(tokens))])
        cache.lengths += tokens.shape[1]
        self._note(cache)
        return out

    def _note(self, cache: KVCache) -> None:
        assert (cache.lengths <= cache.capacity).all()
        self.biggest = (max(self.biggest[0], cache.batch_size), max(self.biggest[1], int(cache.lengths.max())))

    def _run(self, cache: KVCache, row: int, tokens: Any, start: int) -> Any:
        import torch
        from transformers import DynamicCache

        past = cache.bound.setdefault(str(row), DynamicCache(config=self.model.config))
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.from_numpy(np.ascontiguousarray(tokens))[None],
                position_ids=torch.arange(start, start + len(tokens))[None],
                use_cache=True,
                **{cache_argument(self.model): past},
            )
        return output.logits[0].float().numpy()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(tmp_path_factory.mktemp("parity") / "llama")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(models.load_model(folder), threads=1)


CORPUS = load_corpus(256)


def measured(session: Any, reference: Reference, bound: Bound = BOUNDS["fp32"], **settings: Any) -> ParityFigures:
    return measure_parity(session, reference, CORPUS, bound, **{"positions": POSITIONS, **settings})


def test_faithful_engine_passes_the_float32_bound(folder: Path, reference: Reference) -> None:
    """Another instance of the same weights, run over a cache, is within 1e-3 of the logits' range everywhere."""
    session = CachedSession(models.load_model(folder))
    lines: list[tuple[str, float | None]] = []
    figures = measured(session, reference, report=lambda *said: lines.append(said))
    assert figures.passed, figures.misses
    assert figures.top1 == 1.0
    assert figures.greedy_identical
    assert figures.kl_mean < 1e-8
    assert figures.perplexity_ratio == pytest.approx(1.0, abs=1e-5)
    assert figures.max_abs_logit_error < 1e-4 * figures.logit_range
    assert figures.positions >= POSITIONS
    assert figures.decode_steps >= 32
    assert figures.greedy_tokens >= 64
    assert len(lines) == len(figures.cases)
    figures.require()


def test_shapes_cover_batches_ragged_rows_chunks_and_steps(folder: Path, reference: Reference) -> None:
    """Several batch sizes, lengths and pasts are compared, not one example's."""
    cases = measured(CachedSession(models.load_model(folder)), reference).cases
    prefills = {tuple(case["prefill"]) for case in cases}
    assert {len(rows) for rows in prefills} == {1, 2, 3}
    assert any(len(set(rows)) == 3 for rows in prefills)
    assert any(max(case["decode"], default=0) > 1 and len(set(case["prefill"])) > 1 for case in cases)
    assert any(case["decode"].count(1) >= 32 and len(set(case["prefill"])) == 3 for case in cases)
    assert all(case["positions"] > 0 for case in cases)


def flip_sign(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.mul_(-1)


def double_scale(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.weight[:8].mul_(2)


def scale_attention(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def nan_in_one_embedding(model: Any) -> None:
    model.model.embed_tokens.weight[int(CORPUS.tokens[40]), 0] = float("nan")


@pytest.mark.parametrize("fault", [flip_sign, double_scale, scale_attention])
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_wrong_constant_misses_every_precisions_bound(
    folder: Path, reference: Reference, fault: Any, precision: str
) -> None:
    """A sign flipped, a scale doubled: the miss says which figure, what is accepted, and where the worst logit is."""
    import torch

    model = models.load_model(folder)
    with torch.no_grad():
        fault(model)
    figures = measured(CachedSession(model), reference, BOUNDS[precision])
    assert not figures.passed
    assert figures.max_abs_logit_error > 1e-3 * figures.logit_range
    assert "is accepted" in figures.misses[0]
    assert "output logits, row" in figures.misses[-1]
    assert not figures.greedy_identical
    with pytest.raises(ParityError, match="does not compute what PyTorch computes"):
        figures.require()


def test_nan_is_a_failure_that_is_located(folder: Path, reference: Reference) -> None:
    """One NaN constant that only some tokens meet: the run fails and JSON stays valid."""
    import torch

    model = models.load_model(folder)
    with torch.no_grad():
        nan_in_one_embedding(model)
    figures = measured(CachedSession(model), reference, BOUNDS["int4"])
    assert not figures.passed
    assert "NaN or infinite at" in figures.misses[0]
    assert "position" in figures.misses[0]
    plain = json.loads(json.dumps(figures.to_dict(), allow_nan=False))
    assert plain["kl_mean"] is None
    assert plain["max_abs_logit_error"] is None
    assert plain["passed"] is False


def test_shifted_decode_positions_are_found(folder: Path, reference: Reference) -> None:
    """Prefill is right, decode counts its past one too far: only comparing decode steps shows it."""
    session = CachedSession(models.load_model(folder))
    session.shift = 1
    figures = measured(session, reference)
    assert not figures.passed
    wrong = {case["kind"] for case in figures.cases if case["max_abs_logit_error"] > 1e-3 * figures.logit_range}
    assert "decode" in wrong
    assert "prefill" not in wrong


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_fault_in_decode_alone_is_not_hidden_by_much_text(folder: Path, reference: Reference, precision: str) -> None:
    """Most positions are right, so at 4 bits the mean is within its bound; decode is named all the same."""
    session = CachedSession(models.load_model(folder))
    session.shift = 1
    figures = measured(session, reference, BOUNDS[precision], positions=2048)
    assert precision == "int8" or figures.kl_mean < 0.20
    assert any("kl_mean of decode steps" in miss for miss in figures.misses)
    assert any("kl_mean of chunks on a past" in miss for miss in figures.misses)
    assert not any("prompts in batches" in miss for miss in figures.misses)


def test_reading_a_padded_position_is_found(folder: Path, reference: Reference) -> None:
    """Rows shorter than the batch's longest give the padding's logits."""
    session = CachedSession(models.load_model(folder))
    session.reads_padding = True
    figures = measured(session, reference)
    assert not figures.passed
    single = [case for case in figures.cases if len(case["prefill"]) == 1]
    assert all(case["max_abs_logit_error"] < 1e-3 * figures.logit_range for case in single)


def test_a_missing_attention_window_is_found(tmp_path: Path) -> None:
    """Short prompts agree; beyond the window an engine that attends to everything departs."""
    folder = models.tiny("mistral", tmp_path / "mistral")
    reference = Reference(models.load_model(folder), threads=1)
    model = models.load_model(folder)
    assert measured(CachedSession(model), reference, windows=(8, 8)).passed
    model.config.sliding_window = None
    figures = measured(CachedSession(model), reference, windows=(8, 8))
    assert not figures.passed
    short = [case for case in figures.cases if max(case["prefill"]) + sum(case["decode"]) <= 8]
    assert short
    assert all(case["max_abs_logit_error"] < 1e-3 * figures.logit_range for case in short)


def test_an_attention_window_gets_a_prompt_longer_than_it(folder: Path, reference: Reference) -> None:
    """A window of 100 is longer than all other prompts: one is added that passes it."""
    cases = measured(CachedSession(models.load_model(folder)), reference, windows=(None, 100)).cases
    assert [117] in [case["prefill"] for case in cases]


@pytest.mark.parametrize(("capacity", "batch", "prompt"), [(1, None, None), (8, 1, None), (40, 2, 5), (128, 3, 16)])
def test_limits_of_the_engine_are_kept(
    folder: Path, reference: Reference, capacity: int, batch: int | None, prompt: int | None
) -> None:
    """An engine of any capacity, batch size and prompt length can be measured, up to its limits."""
    session = CachedSession(models.load_model(folder), capacity=capacity, max_batch_size=batch)
    figures = measured(session, reference, max_input_len=prompt)
    assert figures.passed, figures.misses
    assert session.biggest[1] <= capacity
    assert session.biggest[0] <= (batch or 3)
    assert all(max(case["prefill"]) <= (prompt or capacity) for case in figures.cases)


def test_rows_stay_on_one_side_of_a_rope_change(tmp_path: Path) -> None:
    """Long rope changes its frequencies at 17 tokens: what the reference gives for a whole row holds on either side."""
    folder = models.tiny("phi3", tmp_path / "phi3")
    reference = Reference(models.load_model(folder), threads=1)
    session = CachedSession(models.load_model(folder))
    session.recompute_at = 17
    figures = measured(session, reference)
    assert figures.passed, figures.misses
    totals = [[length + sum(case["decode"]) for length in case["prefill"]] for case in figures.cases]
    assert any(max(total) < 17 for total in totals)
    assert any(min(case["prefill"]) >= 17 and case["decode"].count(1) >= 32 for case in figures.cases)


def test_greedy_runs_equal_those_of_generate(folder: Path, reference: Reference) -> None:
    """What the figure says of the greedy run is what `generate` says: the same tokens from the same prompts."""
    prompt = models.find_gap_prompt(models.load_model(folder), 9, new_tokens=32)
    model = models.load_model(folder)
    tokens = models.reference_tokens(model, prompt, max_new_tokens=32, eos_token_id=None)
    chosen = reference.logits(np.array([*prompt, *tokens[:-1]]))[len(prompt) - 1 :].argmax(axis=1)
    assert chosen.tolist() == tokens


def test_a_tie_in_the_reference_is_not_held_against_a_greedy_run(tmp_path: Path) -> None:
    """Two tokens with exactly equal logits: the engine that prefers the second is right, a worse third is not."""
    folder = models.fixed_gpt2(tmp_path / "tie", [1.0, 5.0, 5.0, 0.0, -1.0])
    reference = Reference(models.load_model(folder), threads=1)
    corpus = Corpus(np.arange(5), source="random ids")
    for logits, identical in (([1.0, 5.0, 5.0001, 0.0, -1.0], True), ([5.1, 5.0, 5.0, 0.0, -1.0], False)):
        engine = models.load_model(models.fixed_gpt2(tmp_path / str(identical), logits))
        figures = measure_parity(CachedSession(engine), reference, corpus, BOUNDS["fp32"], positions=100)
        assert figures.greedy_identical is identical
        assert figures.passed is identical


def test_figures_are_those_of_arithmetic_by_hand(tmp_path: Path) -> None:
    """Fixed logits: KL, top-1, error, range and perplexity ratio are known in closed form."""
    z, e = np.array([0.0, 1.0, 2.0]), np.array([0.0, 3.0, 2.5])
    p, q = (np.exp(x) / np.exp(x).sum() for x in (z, e))
    reference = Reference(models.load_model(models.fixed_gpt2(tmp_path / "z", z.tolist())), threads=1)
    engine = CachedSession(models.load_model(models.fixed_gpt2(tmp_path / "e", e.tolist())))
    corpus = Corpus(np.zeros(64, np.int64), source="random ids")
    figures = measure_parity(engine, reference, corpus, BOUNDS["int8"], positions=100)
    assert figures.kl_mean == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-5)
    assert figures.top1 == 0.0
    assert figures.max_abs_logit_error == pytest.approx(2.0)
    assert figures.logit_range == pytest.approx(2.0)
    assert figures.perplexity_ratio == pytest.approx(float(p[0] / q[0]), rel=1e-5)
    assert [miss.split()[0] for miss in figures.misses[:3]] == ["kl_mean", "top1", "perplexity_ratio"]


def test_tolerances_take_the_place_of_the_tables(folder: Path, reference: Reference) -> None:
    """The same small error passes or fails as `atol` and `rtol` say, at any precision."""
    import torch

    model = models.load_model(folder)
    with torch.no_grad():
        model.lm_head.weight[7] += 0.01
    session = CachedSession(model)
    error = measured(session, reference).max_abs_logit_error
    for bound, passes in (
        (bound_of("fp32", atol=error * 1.01), True),
        (bound_of("fp32", atol=error * 0.99), False),
        (bound_of("int8", rtol=0.5), True),
        (bound_of("int8", atol=error / 2, rtol=0.0), False),
    ):
        assert measured(session, reference, bound).passed is passes, bound
    with pytest.raises(UsageError, match="atol: got -1"):
        bound_of("fp32", atol=-1)
    with pytest.raises(UsageError, match="rtol: got nan"):
        bound_of("fp32", rtol=float("nan"))
    with pytest.raises(UsageError, match="int3"):
        bound_of("int3")
    assert bound_of("int8-activations").kl_mean == 0.03
    assert bound_of("int8-weights").kl_mean == 0.01
    assert bound_of("int4-g32").top1 == 0.78


def test_another_vocabulary_is_another_model(folder: Path, tmp_path: Path) -> None:
    """A reference that is not this engine's checkpoint is refused before anything is run."""
    other = Reference(models.load_model(models.tiny_llama(tmp_path / "other", vocab_size=320)), threads=1)
    with pytest.raises(ParityError, match="256 tokens, the reference's 320"):
        measured(CachedSession(models.load_model(folder)), other)


def test_a_checkpoint_that_gives_nan_is_not_a_reference(folder: Path) -> None:
    """The checkpoint is at fault, not the engine: said so."""
    import torch

    broken = models.load_model(folder)
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    with pytest.raises(CheckpointError, match="checkpoint itself gives NaN"):
        measured(CachedSession(models.load_model(folder)), Reference(broken, threads=1))


def test_reference_in_pieces_equals_the_whole_and_leaves_the_model_as_it_was(folder: Path) -> None:
    """Chunks over a cache give the same logits as one pass; attention form, mode and threads are put back."""
    import torch

    model = models.load_model(folder)
    model.set_attn_implementation("sdpa")
    model.train()
    threads = torch.get_num_threads()
    reference = Reference(model, threads=threads + 1)
    row = CORPUS.row(0, 50)
    whole = reference.logits(row)
    pieces = list(reference.stream(row, 16))
    assert [len(piece) for piece in pieces] == [16, 16, 16, 2]
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-4)
    np.testing.assert_allclose(whole, models.reference_logits(models.load_model(folder), row.tolist()), atol=1e-5)
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    assert torch.get_num_threads() == threads


def test_soft_caps_are_part_of_the_reference(tmp_path: Path) -> None:
    """Gemma 2's soft caps change its logits; an engine without them fails."""
    folder = models.tiny("gemma2", tmp_path / "gemma")
    reference = Reference(models.load_model(folder), threads=1)
    assert measured(CachedSession(models.load_model(folder)), reference).passed
    model = models.load_model(folder)
    model.config.attn_logit_softcapping = None
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert not measured(CachedSession(model), reference).passed


def test_corpus_is_text_where_the_tokenizer_fits(tmp_path: Path) -> None:
    """English prose of at least 2,048 tokens with the tokenizer's BOS in front; else random ids, always the same."""
    file = models.byte_tokenizer(tmp_path / "bos", add_bos=True) / "tokenizer.json"
    corpus = load_corpus(320, file)
    assert corpus.source == "text"
    assert corpus.prefix == (models.BOS,)
    assert corpus.row(0, 4).tolist() == [models.BOS, *models.byte_ids("The")]
    assert corpus.row(len(corpus.tokens) - 1, 4).tolist()[2:] == models.byte_ids("Th")
    assert len(corpus.tokens) > 10_000
    plain = models.byte_tokenizer(tmp_path / "plain") / "tokenizer.json"
    assert load_corpus(320, plain).prefix == ()
    assert load_corpus(64, plain).source == "random ids"
    assert load_corpus(64).tokens.tolist() == load_corpus(64, tmp_path / "missing").tokens.tolist()
    assert load_corpus(64).tokens.max() < 64
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_corpus(64, tmp_path / "tokenizer.json")
