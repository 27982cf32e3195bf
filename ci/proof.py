"""How far a build of an export is from the checkpoint in PyTorch."""

from __future__ import annotations

import dataclasses
from functools import cached_property

from adx.ci.bounds import Bound, bound_of
from adx.ci.built import Built, Source
from adx.ci.corpus import Corpus, load_corpus
from adx.ci.evaluate import EvalResult, evaluate_session
from adx.ci.export_request import ExportRequest
from adx.ci.figures import ParityFigures
from adx.ci.half_range import probe_rows
from adx.ci.parity import measure_parity
from adx.ci.reference import Reference
from adx.runtime.session import Session

TRIAL_WINDOW, TRIAL_TOKENS = 256, 2048


class Proof:
    """The reference and the text of one export; builds of it are compared with them."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def parity(self, built: Built) -> ParityFigures:
        """Parity as the export promises it."""
        source = self._source
        source.report("loading the engine", None)
        session = built.open()
        try:
            figures = measure_parity(
                session,
                self._reference(session),
                self.corpus,
                budget_of(source.request),
                max_input_len=source.limits.max_input_len,
                windows=source.spec.kv_cache.windows,
                seed=source.request.seed,
                report=source.report,
            )
        finally:
            session.close()
        misses = built.check(probe_rows(self.corpus, source.spec.vocab_size, source.limits.max_input_len))
        return dataclasses.replace(figures, misses=(*figures.misses, *misses))

    def quality(self, built: Built) -> EvalResult:
        """The figures of a candidate on the text, which is quicker."""
        source = self._source
        session = built.open()
        try:
            return evaluate_session(
                session,
                dataclasses.replace(self.corpus, tokens=self.corpus.tokens[:TRIAL_TOKENS]),
                self._reference(session),
                window=TRIAL_WINDOW,
                max_input_len=source.limits.max_input_len,
                report=source.report,
            )
        finally:
            session.close()

    @cached_property
    def corpus(self) -> Corpus:
        """Text that nothing was calibrated on."""
        tokenizer = self._source.folder / "tokenizer.json"
        return load_corpus(self._source.spec.vocab_size, tokenizer if tokenizer.exists() else None)

    def _reference(self, session: Session) -> Reference:
        return Reference(self._source.model, threads=session.threads)


def budget_of(request: ExportRequest) -> Bound:
    """The precision's parity bound, with the request's budget in its place where it names one."""
    bound = bound_of(request.bound, atol=request.atol, rtol=request.rtol)
    if request.max_kl is not None:
        bound = dataclasses.replace(bound, kl_mean=request.max_kl)
    if request.max_ppl_increase is not None:
        bound = dataclasses.replace(bound, perplexity_ratio=1 + request.max_ppl_increase)
    return bound
