"""Figures for people: parity, sizes and times as lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# How a figure of parity is shown, and which bound limits it.
PARITY = {
    "kl_mean": ("mean KL divergence", "{:.2g}", "<="),
    "top1": ("top-1 agreement", "{:.2%}", ">="),
    "perplexity_ratio": ("perplexity ratio", "{:.4f}", "<="),
    "max_abs_logit_error": ("largest logit error", "{:.3g}", "<="),
}


def number(value: float | None, form: str = "{:,.1f}") -> str:
    """A number in a form, or a dash where there is none."""
    return "-" if value is None else form.format(value)


def parity_lines(parity: Mapping[str, Any] | None) -> list[str]:
    """What was compared with PyTorch and how close it was."""
    if parity is None:
        return ["parity: not measured"]
    if "kl_mean" not in parity:
        return [f"parity: not measured ({parity.get('reason', parity.get('skipped', 'no reason given'))})"]
    bound = parity.get("bound") or {}
    lines = []
    for key, (label, form, sign) in PARITY.items():
        limit = bound.get(key)
        accepted = f"  (bound {sign} {form.format(limit)})" if limit is not None else ""
        lines.append(f"  {label:<22}{number(parity.get(key), form)}{accepted}")
    if parity.get("logit_range"):
        tolerance = f"  (bound <= {bound['rtol']:g} of it)" if bound.get("rtol") else ""
        lines[-1] += f", the logits span {parity['logit_range']:.4g}{tolerance}"
    lines.append(
        f"  {'greedy tokens':<22}{'identical' if parity.get('greedy_identical') else 'differ (a bound at fp32 only)'}"
    )
    lines += [f"  missed: {miss}" for miss in parity.get("misses") or ()]
    cases = parity.get("cases")
    counted = f" over {len(cases)} cases" if isinstance(cases, (list, tuple)) else ""
    recorded = ", as recorded at the export" if parity.get("recorded") else ""
    verdict = "passed" if parity.get("passed") else "FAILED"
    return [f"parity with PyTorch float32: {verdict}{counted}{recorded}", *lines]


def size(count: float) -> str:
    """Bytes, in the unit that suits them."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:.0f} bytes"
