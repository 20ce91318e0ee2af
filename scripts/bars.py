"""The bars of the benchmarks, and the line that each of them ends with.

A bar is `{"name", "value", "unit", "bar", "ok"}`; `value` and `bar` are numbers, or null where
there was nothing to measure or to compare with, and then the bar is not met. Used by `bench_*.py`
and by `sim_forest.py`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

Bar = dict[str, Any]
DIGITS = 4


def at_most(name: str, value: float | None, bar: float | None, unit: str) -> Bar:
    """Met where `value` is no more than `bar`; both in `unit`."""
    value, bar = _number(value), _number(bar)
    return _bar(name, value, bar, unit, value is not None and bar is not None and value <= bar)


def at_least(name: str, value: float | None, bar: float | None, unit: str) -> Bar:
    """Met where `value` is no less than `bar`; both in `unit`."""
    value, bar = _number(value), _number(bar)
    return _bar(name, value, bar, unit, value is not None and bar is not None and value >= bar)


def ratio(value: float | None, reference: float | None) -> float | None:
    """`value` over `reference`; None where either was not measured or the latter is no divisor."""
    value, reference = _number(value), _number(reference)
    return None if value is None or reference is None or reference <= 0 else value / reference


def emit(bench: str, bars: Sequence[Bar], **figures: Any) -> None:
    """The last line of standard output. A figure that is not finite is null."""
    line = {"bench": bench, "bars": list(bars), **figures}
    sys.stdout.write(json.dumps(finite(line), allow_nan=False) + "\n")
    sys.stdout.flush()


def finite(figure: Any) -> Any:
    """`figure` with None for every number that JSON does not have, however deep."""
    match figure:
        case float():
            return _number(figure)
        case Mapping():
            return {key: finite(value) for key, value in figure.items()}
        case list() | tuple():
            return [finite(value) for value in figure]
    return figure


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _bar(name: str, value: float | None, bar: float | None, unit: str, ok: bool) -> Bar:
    shown = None if value is None else round(value, DIGITS)
    limit = None if bar is None else round(bar, DIGITS)
    return {"name": name, "value": shown, "unit": unit, "bar": limit, "ok": ok}
