"""Perplexity of a text, and an engine's distance from the reference over it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from numpy.typing import NDArray

from adx.ci.corpus import Corpus
from adx.ci.evaluate import CHUNK, EvalResult, evaluate_session, read_text
from adx.ci.reference import Reference
from adx.export.errors import ParityError, UsageError
from adx.runtime.fake import FakeSession

VOCAB = 16


def bigram(table: NDArray[np.float32]) -> Any:
    """Logits that depend on the newest token alone."""
    return lambda held: table[held[-1]]


@pytest.fixture
def table() -> NDArray[np.float32]:
    return np.random.default_rng(3).normal(0, 2, (VOCAB, VOCAB)).astype(np.float32)


def log_softmax(table: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = table.astype(np.float64)
    normal: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return normal


@pytest.mark.parametrize("window", [2, 7, 64, 100, 512])
@pytest.mark.parametrize("count", [2, 65, 200])
def test_every_token_but_the_first_is_predicted_once(table: NDArray[np.float32], window: int, count: int) -> None:
    """Whatever the window, perplexity of a bigram model is that of the whole text: no token lost or counted twice."""
    tokens = np.random.default_rng(1).integers(VOCAB, size=count)
    result = evaluate_session(FakeSession(bigram(table), VOCAB, capacity=128), Corpus(tokens), window=window)
    nll = -log_softmax(table)[tokens[:-1], tokens[1:]].mean()
    assert result.tokens == count - 1
    assert result.perplexity == pytest.approx(math.exp(nll), rel=1e-6)
    assert (result.kl_mean, result.top1, result.perplexity_ratio) == (None, None, None)


@pytest.mark.parametrize("prefix", [(1,), (5, 1)])
def test_with_bos_the_first_token_is_predicted_too(table: NDArray[np.float32], prefix: tuple[int, ...]) -> None:
    """Each window starts with the tokenizer's own tokens, which are not predicted themselves."""
    tokens = np.random.default_rng(1).integers(VOCAB, size=130)
    window = 40
    session = FakeSession(bigram(table), VOCAB, capacity=128)
    result = evaluate_session(session, Corpus(tokens, prefix), window=window)
    step = window - len(prefix) + 1
    before = [prefix[-1] if at % step == 0 else int(tokens[at - 1]) for at in range(len(tokens))]
    assert result.tokens == 130
    assert result.perplexity == pytest.approx(math.exp(-log_softmax(table)[before, tokens].mean()), rel=1e-6)


def test_few_logits_are_held_at_once(table: NDArray[np.float32]) -> None:
    """No call asks for more than `CHUNK` positions, or for more than a prompt may have."""
    session = FakeSession(bigram(table), VOCAB, capacity=512)
    asked: list[int] = []
    prefill, decode = session.prefill, session.decode
    session.prefill = lambda tokens, *rest: (asked.append(tokens.shape[1]), prefill(tokens, *rest))[1]  # type: ignore[method-assign]
    session.decode = lambda tokens, *rest: (asked.append(tokens.shape[1]), decode(tokens, *rest))[1]  # type: ignore[method-assign]
    tokens = np.zeros(1000, np.int64)
    evaluate_session(session, Corpus(tokens))
    assert max(asked) == CHUNK
    asked.clear()
    evaluate_session(session, Corpus(tokens), max_input_len=10)
    assert max(asked) == 10


def test_windows_stay_below_a_rope_change(table: NDArray[np.float32]) -> None:
    """A row never grows to the length at which its cache would have to be computed again."""
    session = FakeSession(bigram(table), VOCAB, capacity=64, recompute_at=17)
    assert evaluate_session(session, Corpus(np.zeros(100, np.int64))).window == 16


def test_figures_against_a_reference(tmp_path: Path) -> None:
    """Fixed logits on both sides: KL, top-1 and the perplexity ratio are those of arithmetic by hand."""
    z, e = np.array([0.0, 1.0, 2.0]), np.array([0.0, 3.0, 2.5])
    p, q = (np.exp(x) / np.exp(x).sum() for x in (z, e))
    reference = Reference(models.load_model(models.fixed_gpt2(tmp_path / "z", z.tolist())), threads=1)
    session = FakeSession(lambda held: e.astype(np.float32), 3, capacity=64)
    result = evaluate_session(session, Corpus(np.array([0, 0, 1] * 30)), reference, window=50)
    nll = [-(np.log(x)[[0, 1]] * [59 / 89, 30 / 89]).sum() for x in (q, p)]
    assert result == EvalResult(
        tokens=89,
        perplexity=pytest.approx(math.exp(nll[0])),
        window=50,
        kl_mean=pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-5),
        top1=0.0,
        perplexity_ratio=pytest.approx(math.exp(nll[0] - nll[1])),
    )


def test_a_faithful_engine_is_the_reference(tmp_path: Path) -> None:
    """Both read the same windows in the same pieces: KL 0, every token alike, ratio 1; perplexity is transformers'."""
    import torch

    model = models.load_model(models.tiny_llama(tmp_path / "llama"))
    tokens = np.random.default_rng(0).integers(3, 256, 90)
    result = evaluate_session(models.TorchSession(model), Corpus(tokens), Reference(model, threads=1))
    loss = float(model(torch.tensor(tokens[None]), labels=torch.tensor(tokens[None])).loss.detach())
    assert result.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert result.kl_mean == pytest.approx(0, abs=1e-8)
    assert result.top1 == 1.0
    assert result.perplexity_ratio == pytest.approx(1, abs=1e-5)


def test_nan_is_an_error(table: NDArray[np.float32]) -> None:
    """A perplexity that is not a number is never printed."""
    table[3, 3] = np.nan
    with pytest.raises(ParityError, match="NaN or infinity at position 2"):
        evaluate_session(FakeSession(bigram(table), VOCAB), Corpus(np.array([1, 2, 3, 4, 5])))


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    """Empty, blank, not UTF-8, missing: each is a usage error that says what to do."""
    for content, message in ((b"", "holds no text"), (b" \n\t", "holds no text"), (b"caf\xe9", "is not UTF-8")):
        (tmp_path / "text").write_bytes(content)
        with pytest.raises(UsageError, match=message):
            read_text(tmp_path / "text")
    with pytest.raises(UsageError, match="cannot be read"):
        read_text(tmp_path / "none")


def test_inputs_that_cannot_be_scored(table: NDArray[np.float32], tmp_path: Path) -> None:
    """One token, foreign ids, a window without room, another model's reference."""
    session = FakeSession(bigram(table), VOCAB)
    for corpus, window, message in (
        (Corpus(np.array([1])), 8, "gives 1 tokens"),
        (Corpus(np.array([], np.int64)), 8, "gives 0 tokens"),
        (Corpus(np.array([1, 99])), 8, "gives id 99"),
        (Corpus(np.array([1, 2]), (1,)), 1, "window: got 1"),
        (Corpus(np.array([1, 2])), 0, "window: got 0"),
    ):
        with pytest.raises(UsageError, match=message):
            evaluate_session(session, corpus, window=window)
    other = Reference(models.load_model(models.fixed_gpt2(tmp_path / "three", [1.0, 2.0, 3.0])), threads=1)
    with pytest.raises(ParityError, match="16 tokens, the reference's 3"):
        evaluate_session(session, Corpus(np.array([1, 2])), other)
