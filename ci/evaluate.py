"""Perplexity of a text under a bundle's engine; with a reference also how far the two are from each other."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adx.ci.corpus import Corpus, encode_text
from adx.ci.distance import distance, negative_log_likelihood
from adx.ci.progress import Report, quiet
from adx.ci.reference import Reference
from adx.export.bundle import Bundle
from adx.export.errors import ParityError, UsageError
from adx.runtime.session import Session

CHUNK = 64  # tokens whose logits are in memory at once
WINDOW = 512

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]


@dataclass(frozen=True)
class EvalResult:
    """What was read and how well it was predicted; the last three are None without a reference.

    Attributes:
        tokens: tokens that were predicted.
        perplexity: exp of the mean negative log-likelihood, in nats, of these tokens.
        window: tokens that a prediction could see at most.
        kl_mean: mean over positions of KL(reference || engine), in nats.
        top1: share of positions with the same most likely token.
        perplexity_ratio: the engine's perplexity over the reference's.
    """

    tokens: int
    perplexity: float
    window: int
    kl_mean: float | None = None
    top1: float | None = None
    perplexity_ratio: float | None = None


def evaluate_bundle(
    path: str | os.PathLike[str],
    text_file: str | os.PathLike[str],
    reference: str | None = None,
    *,
    target: str | None = None,
    threads: int | None = None,
    max_tokens: int | None = None,
    window: int = WINDOW,
    report: Report = quiet,
) -> EvalResult:
    """Read a text with a bundle's engine, window after window.

    Args:
        path: the bundle.
        text_file: UTF-8 text.
        reference: the checkpoint to compare with, or None.
        target: which of its engines to run; default: its first.
        threads: threads of both; default: what this process may use.
        max_tokens: read only the text's first tokens.
        window: tokens read in one go; each window starts without memory of the one before.
        report: told how far it is.

    Raises:
        UsageError: the text is not there, not UTF-8 or too short, or the bundle has no tokenizer for it.
        BundleError: the bundle is damaged.
        CheckpointError: the reference cannot be loaded.
        ParityError: the engine gives NaN, or the reference is another model.
    """
    from adx.runtime import load

    text = read_text(Path(text_file))
    bundle = Bundle.open(path)
    tokenizer_file = bundle.find("tokenizer.json")
    if tokenizer_file is None:
        raise UsageError(
            f"{bundle.path} has no tokenizer.json, so it cannot read text: export a checkpoint that has one"
        )
    corpus = encode_text(tokenizer_file, text)
    if max_tokens is not None:
        corpus = Corpus(corpus.tokens[:max_tokens], corpus.prefix)
    report("loading the engine", None)
    session = load(bundle.path, target=target, threads=threads).session
    torch_model = None
    if reference is not None:
        report("loading the reference", None)
        torch_model = Reference.load(reference, threads=session.threads)
    return evaluate_session(
        session, corpus, torch_model, window=window, max_input_len=bundle.manifest.limits.max_input_len, report=report
    )


def read_text(path: Path) -> str:
    """A text file's content.

    Raises:
        UsageError: it cannot be read, is not UTF-8 or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start}): convert it, as with iconv -t UTF-8"
        ) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise UsageError(f"{path} holds no text: give a file of at least a few sentences")
    return text


def evaluate_session(
    session: Session,
    corpus: Corpus,
    reference: Reference | None = None,
    *,
    window: int = WINDOW,
    max_input_len: int | None = None,
    report: Report = quiet,
) -> EvalResult:
    """Predict every token of a corpus from those before it in its window.

    The first token is predicted only where the tokenizer puts BOS before a text. No more than `CHUNK` positions of
    logits are held at once.

    Raises:
        UsageError: the text gives fewer than two tokens, or ids that the model lacks, or the window is below 2.
        ParityError: the engine gives NaN or infinity, or the reference is another model.
    """
    size = min(window, session.capacity, (session.recompute_at or session.capacity + 1) - 1)
    _check(session, corpus, reference, size)
    chunk = min(CHUNK, size, max_input_len or size)
    cache = session.new_cache(1, size)
    sums = {"tokens": 0, "nll": 0.0, "their_nll": 0.0, "kl": 0.0, "agree": 0}
    for row, targets in _windows(corpus, size):
        report("reading the text", sums["tokens"] / len(corpus.tokens))
        cache.clear()
        skipped = len(row) - len(targets)  # special tokens in front of BOS predict nothing
        theirs = reference.stream(row, chunk) if reference is not None else None
        for start in range(0, len(row), chunk):
            tokens = row[None, start : start + chunk]
            if start:
                logits = session.decode(tokens, cache)[0]
            else:
                logits = session.prefill(tokens, np.array([tokens.shape[1]]), cache, "all")[0]
            first = max(0, skipped - start)
            wanted = targets[start + first - skipped : start + len(logits) - skipped]
            expected = None if theirs is None else next(theirs)[first:]
            _add(sums, logits[first:], wanted, expected, start + first)
    return _result(sums, size, reference is not None)


def _check(session: Session, corpus: Corpus, reference: Reference | None, size: int) -> None:
    count = len(corpus.tokens)
    if count + min(len(corpus.prefix), 1) < 2:
        raise UsageError(f"the text gives {count} tokens: at least 2 are needed to predict one from another")
    highest = max(int(corpus.tokens.max()), *corpus.prefix, 0)
    if highest >= session.vocab_size:
        raise UsageError(f"the tokenizer gives id {highest}, and the model has {session.vocab_size} tokens")
    if size <= len(corpus.prefix):
        raise UsageError(
            f"window: got {size} tokens (the engine's rows hold {session.capacity}), accepted are more than the "
            f"{len(corpus.prefix)} that the tokenizer puts before every text"
        )
    if reference is not None and reference.vocab_size != session.vocab_size:
        raise ParityError(
            f"the engine's vocabulary has {session.vocab_size} tokens, the reference's {reference.vocab_size}: "
            "they are different models; name the checkpoint that this bundle was made from"
        )


def _windows(corpus: Corpus, size: int) -> Iterator[tuple[Tokens, Tokens]]:
    """Yields (tokens to read, the token after each of them, less those for the prefix's own tokens)."""
    prefix, tokens = np.array(corpus.prefix, np.int64), corpus.tokens
    if not len(prefix):
        for start in range(0, len(tokens) - 1, size):
            targets = tokens[start + 1 : start + 1 + size]
            yield tokens[start : start + len(targets)], targets
        return
    step = size - len(prefix) + 1
    for start in range(0, len(tokens), step):
        targets = tokens[start : start + step]
        yield np.concatenate([prefix, targets[:-1]]), targets


def _add(sums: dict[str, Any], logits: Logits, targets: Tokens, expected: Logits | None, position: int) -> None:
    finite = np.isfinite(logits).all(axis=1)
    if not finite.all():
        at = position + int(finite.argmin())
        raise ParityError(
            f"the engine gives NaN or infinity at position {at} of a window, after {sums['tokens']} tokens: "
            "run adx verify with --reference to find where it departs"
        )
    sums["tokens"] += len(targets)
    sums["nll"] += float(negative_log_likelihood(logits, targets).sum())
    if expected is not None:
        found = distance(expected, logits)
        sums["their_nll"] += float(negative_log_likelihood(expected, targets).sum())
        sums["kl"] += float(found.kl.sum())
        sums["agree"] += int(found.agree.sum())


def _result(sums: dict[str, Any], window: int, compared: bool) -> EvalResult:
    count = sums["tokens"]
    perplexity = _exp(sums["nll"] / count)
    if not compared:
        return EvalResult(count, perplexity, window)
    ratio = _exp((sums["nll"] - sums["their_nll"]) / count)
    return EvalResult(count, perplexity, window, sums["kl"] / count, sums["agree"] / count, ratio)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
