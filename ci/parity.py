"""Parity: an engine's logits against PyTorch float32, over shapes, pasts, decode steps and a greedy run."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adx.ci.bounds import Bound, bound_of, check
from adx.ci.cases import Case, Limits, plan_cases
from adx.ci.corpus import Corpus, load_corpus
from adx.ci.distance import distance, negative_log_likelihood
from adx.ci.figures import ParityFigures, Tally, finite_or_none
from adx.ci.progress import Report, quiet
from adx.ci.reference import Reference
from adx.engines.plan_record import check_records
from adx.export.bundle import Bundle
from adx.export.errors import BundleError, ParityError, UsageError
from adx.export.spec import GRAPHS
from adx.runtime.cache import KVCache
from adx.runtime.session import Session

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]

__all__ = ["ParityFigures", "VerifyResult", "measure_parity", "verify_bundle"]

POSITIONS, FULL_POSITIONS = 2048, 8192
_GROUP_FACTOR = 3  # how much worse than single prompts batches and decode calls may be
_SLACK = 16  # tokens of room behind a case's longest row
_TEXT_WINDOW = 256
_TEXT_LOGITS = 1 << 24  # logits of one text window (64 MB)


@dataclass(frozen=True)
class VerifyResult:
    """What `verify_bundle` found.

    Attributes:
        passed: every file is what was written, and the engine is within the bounds of its precision.
        integrity: what was checked of the files, in words.
        parity: `ParityFigures.to_dict()`. Without a reference what the export recorded, marked `recorded`: the hashes
            say that these are the files it measured.
    """

    passed: bool
    integrity: str
    parity: Mapping[str, Any]


@dataclass
class _Run:
    """What measuring needs and gathers; `gaps` and `nll` are settled once the logits' range is known."""

    session: Session
    reference: Reference
    corpus: Corpus
    rng: np.random.Generator
    total: Tally = field(default_factory=Tally)
    cases: list[dict[str, Any]] = field(default_factory=list)
    gaps: list[NDArray[np.float64]] = field(default_factory=list)
    nll: list[NDArray[np.float64]] = field(default_factory=list)
    text_cache: KVCache | None = None
    text_start: int = 0


def measure_parity(
    session: Session,
    reference: Reference,
    corpus: Corpus,
    bound: Bound,
    *,
    max_input_len: int | None = None,
    windows: tuple[int | None, ...] = (),
    positions: int = POSITIONS,
    seed: int = 0,
    report: Report = quiet,
) -> ParityFigures:
    """Compare an engine with PyTorch float32 at about `positions` positions.

    Rows of a batch are compared with each row alone in the reference: prefill, chunks and single tokens on pasts of
    different lengths, at least 32 single-token decode steps over given tokens, a free greedy run, and windows of text.
    The greedy run is judged by one reference pass over the engine's own tokens: as long as each of them is the
    reference's choice after the same prefix, the two greedy runs are the same.

    Args:
        session: the engine.
        reference: the same checkpoint.
        corpus: token ids to compare on.
        bound: what is accepted.
        max_input_len: tokens that a prompt can have (default: the engine's capacity).
        windows: `KVCacheSpec.windows`.
        positions: how many positions to score at least.
        seed: of the random choices: where rows start in the corpus, what fills padding.
        report: told how far it is.

    Raises:
        ParityError: the two do not even have the same vocabulary.
        CheckpointError: the reference itself gives NaN.
    """
    if session.vocab_size != reference.vocab_size:
        raise ParityError(
            f"the engine's vocabulary has {session.vocab_size} tokens, the reference's {reference.vocab_size}: "
            "they are different models; name the checkpoint that this bundle was made from"
        )
    started = time.perf_counter()
    limits = Limits(session.capacity, session.max_batch_size, max_input_len, session.recompute_at, windows)
    window = max(2, min(_TEXT_WINDOW, _TEXT_LOGITS // session.vocab_size))
    cases = plan_cases(limits, positions=positions, text_window=window)
    run = _Run(session, reference, corpus, np.random.default_rng(seed))
    for index, case in enumerate(cases):
        report("comparing with PyTorch", index / len(cases))
        tally = _greedy(run, case) if case.kind == "greedy" else _forced(run, case)
        run.total.merge(tally)
        run.cases.append(_case_figures(case, tally))
    return _settle(run, cases, bound, time.perf_counter() - started)


def _forced(run: _Run, case: Case) -> Tally:
    """Feed given tokens; compare every logit that the engine returns."""
    rows = _rows(run, case)
    expected = [run.reference.logits(row[:-1]) for row in rows]
    tally = Tally()
    for row, start, logits in _feed(run, case, rows):
        theirs = expected[row][start : start + len(logits)]
        tally.add(row, start, distance(theirs, logits))
        if case.kind == "text":
            targets = rows[row][start + 1 : start + 1 + len(logits)]
            run.nll.append(np.stack([negative_log_likelihood(array, targets) for array in (theirs, logits)]))
    return tally


def _feed(run: _Run, case: Case, rows: list[Tokens]) -> Iterator[tuple[int, int, Logits]]:
    """Yields (row, first position, (N, V) logits) of each call; the logits are valid until the next item."""
    session, cache = run.session, _cache(run, case)
    lengths = np.array(case.prefill, np.int64)
    logits = session.prefill(_padded(run, rows, lengths), lengths, cache, case.wanted)
    for row, length in enumerate(case.prefill):
        first = 0 if case.wanted == "all" else length - 1
        yield row, first, logits[row][:length] if case.wanted == "all" else logits[row][None]
    if case.wanted == "all" and session.two_graphs:
        # The logits of all positions came from the graph of decode. The other one is to be compared as well, at each
        # row's last token and by what later calls read of the keys and values that it wrote.
        cache.clear()
        logits = session.prefill(_padded(run, rows, lengths), lengths, cache, "last")
        for row, length in enumerate(case.prefill):
            yield row, length - 1, logits[row][None]
    past = lengths.copy()
    for chunk in case.chunks:
        tokens = np.stack([row[start : start + chunk] for row, start in zip(rows, past, strict=True)])
        logits = session.decode(tokens, cache)
        for row, start in enumerate(past):
            yield row, int(start), logits[row]
        past += chunk


def _greedy(run: _Run, case: Case) -> Tally:
    """Feed back the engine's own choices, then ask the reference what it would have chosen after the same tokens."""
    prompts, cache = [row[:-1] for row in _rows(run, Case(case.kind, case.prefill))], _cache(run, case)
    lengths = np.array(case.prefill, np.int64)
    steps = [run.session.prefill(_padded(run, prompts, lengths), lengths, cache, "last").copy()]
    chosen = [steps[0].argmax(axis=-1)]
    for _ in case.chunks:
        steps.append(run.session.decode(chosen[-1][:, None], cache)[:, 0].copy())
        chosen.append(steps[-1].argmax(axis=-1))
    tally, tokens = Tally(), np.stack(chosen, axis=1)  # (B, steps)
    for row, prompt in enumerate(prompts):
        start = len(prompt) - 1
        expected = run.reference.logits(np.concatenate([prompt, tokens[row, :-1]]))[start:]
        tally.add(row, start, distance(expected, np.stack([step[row] for step in steps])))
        own = np.take_along_axis(expected, tokens[row][:, None], axis=1)[:, 0]
        run.gaps.append((expected.max(axis=1) - own).astype(np.float64))
    return tally


def _rows(run: _Run, case: Case) -> list[Tokens]:
    """Tokens of each row and the one after them: text windows one after the other, others from anywhere."""
    rows = []
    for length in case.prefill:
        total = length + sum(case.chunks)
        if case.kind == "text":
            rows.append(run.corpus.row(run.text_start, total + 1))
            run.text_start += max(1, total - len(run.corpus.prefix))
        else:
            rows.append(run.corpus.row(int(run.rng.integers(len(run.corpus.tokens))), total + 1))
    return rows


def _padded(run: _Run, rows: list[Tokens], lengths: Tokens) -> Tokens:
    """(B, T): prompts padded on the right with random ids, so that an engine that reads them departs."""
    tokens = run.rng.integers(run.session.vocab_size, size=(len(rows), int(lengths.max())))
    for row, length in enumerate(lengths):
        tokens[row, :length] = rows[row][:length]
    return tokens


def _cache(run: _Run, case: Case) -> KVCache:
    """A cache for the case: text windows reuse one (with what earlier windows left in it), a decode run fills its own
    to the last token."""
    room = case.longest if case.kind == "decode" else min(run.session.capacity, case.longest + _SLACK)
    if case.kind != "text":
        return run.session.new_cache(len(case.prefill), room)
    if run.text_cache is None or run.text_cache.capacity < case.longest:
        run.text_cache = run.session.new_cache(1, room)
    run.text_cache.clear()
    return run.text_cache


def _case_figures(case: Case, tally: Tally) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "kind": case.kind,
        "prefill": list(case.prefill),
        "decode": list(case.chunks),
        "positions": tally.positions,
        "kl_mean": finite_or_none(tally.kl / tally.positions),
        "top1": tally.agree / tally.positions,
        "max_abs_logit_error": finite_or_none(tally.error),
        "worst": tally.worst,
    }
    return {**figures, "nonfinite": tally.nonfinite} if tally.nonfinite else figures


def _settle(run: _Run, cases: tuple[Case, ...], bound: Bound, seconds: float) -> ParityFigures:
    total, nll = run.total, np.concatenate(run.nll, axis=1)
    logit_range = total.high - total.low
    gaps = np.concatenate(run.gaps) if run.gaps else np.zeros(0)
    excess = float((nll[1] - nll[0]).mean())
    figures = ParityFigures(
        kl_mean=total.kl / total.positions,
        top1=total.agree / total.positions,
        max_abs_logit_error=total.error,
        logit_range=logit_range,
        greedy_identical=bool((gaps <= (bound.largest_error(logit_range) or 0.0)).all()) and not total.nonfinite,
        perplexity_ratio=math.exp(excess) if excess < 700 else math.inf,
        positions=total.positions,
        decode_steps=sum(case.chunks.count(1) for case in cases if case.kind == "decode"),
        greedy_tokens=len(gaps),
        text=run.corpus.source,
        cases=tuple(run.cases),
        bound=bound,
        seconds=round(seconds, 2),
    )
    misses = (*check(figures, bound), *_group_misses(run.cases, bound))
    if total.nonfinite:
        first = next(case for case in run.cases if case.get("nonfinite"))
        misses = (f"logits are NaN or infinite at {total.nonfinite} positions, first in {_where(first)}", *misses)
    elif misses:
        worst = max(run.cases, key=lambda case: float(case["max_abs_logit_error"]))
        misses = (*misses, f"the worst logit is in {_where(worst)}")
    return ParityFigures(**{**figures.__dict__, "misses": misses})


def _group_misses(cases: list[dict[str, Any]], bound: Bound) -> Iterator[str]:
    """Batches and decode calls that are much worse than single prompts: a fault that the mean over all would hide.

    Rounding is the same in all of them, so what single prompts lose to it is the yardstick.
    """
    if bound.kl_mean is None:
        return
    alone, _ = _mean_kl(cases, lambda case: len(case["prefill"]) == 1 and not case["decode"])
    limit = max(bound.kl_mean / 4, _GROUP_FACTOR * alone)
    groups: dict[str, Callable[[dict[str, Any]], bool]] = {
        "prompts in batches": lambda case: len(case["prefill"]) > 1 and not case["decode"],
        "chunks on a past": lambda case: case["kind"] == "chunks",
        "decode steps": lambda case: case["kind"] == "decode",
    }
    for name, belongs in groups.items():
        mean, count = _mean_kl(cases, belongs)
        if mean > limit:
            yield f"kl_mean of {name} is {mean:.4g} over {count} positions, at most {limit:.3g} is accepted of them"


def _mean_kl(cases: list[dict[str, Any]], belongs: Callable[[dict[str, Any]], bool]) -> tuple[float, int]:
    chosen = [case for case in cases if belongs(case) and case["kl_mean"] is not None]
    count = sum(case["positions"] for case in chosen)
    return sum(case["kl_mean"] * case["positions"] for case in chosen) / max(count, 1), count


def _where(case: dict[str, Any]) -> str:
    shape = f"{case['kind']} (prompts {case['prefill']}, then {sum(case['decode'])} tokens)"
    worst = case["worst"]
    return f"{shape}: output logits, row {worst['row']}, position {worst['position']}, token {worst['token']}"


def verify_bundle(
    path: str | os.PathLike[str],
    reference: str | None = None,
    *,
    target: str | None = None,
    threads: int | None = None,
    full: bool = False,
    report: Report = quiet,
) -> VerifyResult:
    """Check every file of a bundle by its hash, then its engine against PyTorch float32.

    Args:
        path: the bundle.
        reference: the checkpoint that it was made from (a folder, a hub id or a .gguf file), or None.
        target: which of its engines to compare; default: its first.
        threads: threads of both; default: what this process may use.
        full: compare at four times as many positions.
        report: told how far it is.

    Raises:
        BundleError: a file is missing or changed; it names each.
        CheckpointError: the reference cannot be loaded.
        ParityError: the reference is another model.
    """
    bundle = Bundle.open(path)
    bundle.verify_files(lambda done, total: report("checking files", done / total if total else None))
    check_records(bundle)
    size = sum(record.size for record in bundle.manifest.files)
    integrity = f"{len(bundle.manifest.files)} files, {size / 1e6:.1f} MB, every hash as written"
    if reference is None:
        recorded = {**bundle.manifest.parity, "recorded": True}
        return VerifyResult(recorded["passed"] is not False, integrity, recorded)
    figures = _bundle_figures(bundle, reference, target, threads, FULL_POSITIONS if full else POSITIONS, report)
    if target == GRAPHS:  # a GPU shows an overflow by itself
        figures = replace(figures, misses=(*figures.misses, *_overflows(bundle, threads)))
    return VerifyResult(figures.passed, integrity, figures.to_dict())


def _overflows(bundle: Bundle, threads: int | None) -> tuple[str, ...]:
    """What float16 does not hold of a bundle's graphs over a preallocated cache."""
    from adx.ci.half_range import overflows, probe_rows

    manifest = bundle.manifest
    engine = manifest.engine(GRAPHS)
    corpus = load_corpus(manifest.model.vocab_size, bundle.find("tokenizer.json"))
    rows = probe_rows(corpus, manifest.model.vocab_size, manifest.limits.max_input_len)
    return overflows(bundle.path / engine.prefill, manifest.kv_cache, rows, threads)


def _bundle_figures(
    bundle: Bundle, source: str, target: str | None, threads: int | None, positions: int, report: Report
) -> ParityFigures:
    from adx.runtime import load

    manifest = bundle.manifest
    try:
        bound = bound_of(manifest.quantization.recipe)
    except UsageError as error:
        raise BundleError(f"{bundle.path}: its quantization recipe is of no known precision: {error}") from error
    report("loading the engine", None)
    session = load(bundle.path, target=target, threads=threads).session
    report("loading the reference", None)
    reference = Reference.load(source, threads=session.threads)
    return measure_parity(
        session,
        reference,
        load_corpus(session.vocab_size, bundle.find("tokenizer.json")),
        bound,
        max_input_len=manifest.limits.max_input_len,
        windows=manifest.kv_cache.windows,
        positions=positions,
        report=report,
    )
