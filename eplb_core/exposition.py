"""What operators read: the numbers of this process's Migrators, Balancers and plug-ins, in Prometheus' text format.

Objects register themselves with `watch` and are forgotten when they are gone; what they counted stays. Nothing is
computed before somebody asks. `eplb_core.adapters.prometheus` gives the same numbers to prometheus_client.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeVar

from eplb_core._text import plain
from eplb_core._version import __version__

Owner = TypeVar("Owner")
Key = tuple[str, tuple[str, ...]]
"""Name of a metric, and the values of its labels, the rank's first."""

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Of `metrics_text`, for an HTTP server."""


class Metric(NamedTuple):
    """What is told of a metric beside its numbers."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()
    """Besides `rank`, which all have."""


_MODEL = ("model",)
METRICS: Final = {
    metric.name: metric
    for metric in (
        Metric(
            "eplb_balancedness_seen_ratio",
            "gauge",
            "Mean / max of the ranks' loads in the last window, under the map that was live; mean over layers.",
            _MODEL,
        ),
        Metric(
            "eplb_balancedness_predicted_ratio",
            "gauge",
            "The same as the map that was computed last promises it.",
            _MODEL,
        ),
        Metric("eplb_balancedness_bound_ratio", "gauge", "The same for the best map that the slots allow.", _MODEL),
        Metric("eplb_placements_total", "counter", "Times that a map was computed.", _MODEL),
        Metric("eplb_experts_received_total", "counter", "Experts that came to this rank."),
        Metric("eplb_read_bytes_total", "counter", "Bytes that this rank read from others."),
        Metric("eplb_read_seconds_total", "counter", "Seconds in which this rank had a read pending."),
        Metric("eplb_layers_installed_total", "counter", "Layers whose new map took effect."),
        Metric("eplb_install_seconds_total", "counter", "Seconds of installs on the forward thread."),
        Metric("eplb_install_longest_seconds", "gauge", "Seconds of the longest install."),
        Metric(
            "eplb_migrations_total",
            "counter",
            "Migrations that ended, by cause; the cause done: the target was reached.",
            ("cause",),
        ),
        Metric("eplb_migration_running", "gauge", "1 while experts move."),
        Metric("eplb_moves_off", "gauge", "1 where no expert moves any more."),
        Metric("eplb_quarantined_slots", "gauge", "Staging slots that an abandoned read may still write."),
        Metric("eplb_record_version", "gauge", "Version of the layout of shared weights, as this process knows it."),
        Metric("eplb_record_dirty", "gauge", "1 where nobody knows what the slots of shared weights hold."),
        Metric("eplb_record_lost", "gauge", "1 where the keeper of shared weights cannot be asked any more."),
        Metric(
            "eplb_part_active", "gauge", "1 where a part of the plug-in is in effect, 0 where it is not.", ("part",)
        ),
        Metric("eplb_fallbacks_total", "counter", "Calls in which the engine's code stood in for a part.", ("part",)),
        Metric("eplb_metrics_errors_total", "counter", "Errors in telling these numbers."),
        Metric("eplb_updated_timestamp_seconds", "gauge", "When this process last told its numbers, in Unix time."),
        Metric("eplb_build_info", "gauge", "1; the label says the version of eplb_core.", ("version",)),
    )
}
"""All that is ever told, by name."""


class Sample(NamedTuple):
    """One number of a metric."""

    name: str
    value: float
    rank: int | None = None
    """None: that of the process (`set_rank`)."""
    labels: tuple[str, ...] = ()
    """Values of the metric's own labels."""


class _Source(NamedTuple):
    owner: weakref.ref[Any]
    counters: Callable[[], Iterable[Sample]]
    gauges: Callable[[Any], Iterable[Sample]]


_sources: list[_Source] = []
_finished: dict[Key, float] = {}
"""What owners that are gone have counted: a counter never falls."""
_lock = threading.RLock()
"""Of one thread at a time: a function that is asked for numbers may itself watch something."""
_rank: list[int | None] = [None]
_errors = [0]
_logged: set[str] = set()


def _start_anew() -> None:
    """In a forked child: what the parent counted is told by the parent, and its lock may never be given back."""
    global _lock
    _lock = threading.RLock()
    _sources.clear()
    _finished.clear()
    _errors[0] = 0


os.register_at_fork(after_in_child=_start_anew)


def _nothing(*_: object) -> tuple[Sample, ...]:
    return ()


def watch(
    owner: Owner,
    *,
    counters: Callable[[], Iterable[Sample]] = _nothing,
    gauges: Callable[[Owner], Iterable[Sample]] = _nothing,
) -> None:
    """Tell the numbers of `owner` from now on, for as long as it lives; what it counted, ever after.

    Args:
        owner: Kept by a weak reference.
        counters: Gives what was counted so far; must not hold `owner`, which would live for ever.
        gauges: Gives what is so now, from `owner`.

    Threads:
        Any; the functions are called on the thread that asks for the numbers. What they raise costs their own numbers
        alone.
    """
    with _lock:
        _fold_finished()
        _sources.append(_Source(weakref.ref(owner), counters, gauges))


def set_rank(rank: int) -> None:
    """Label what does not know its own rank with this one."""
    _rank[0] = rank


def samples() -> dict[Key, float]:
    """Every number now: counters of several owners added up, of gauges the largest; what is not finite is left out.

    Raises nothing: what an owner's function raises is counted and logged once.
    """
    with _lock:
        _fold_finished()
        told, sources = dict(_finished), list(_sources)
    for source in sources:
        owner = source.owner()
        _tell(told, source.counters)
        if owner is not None:
            _tell(told, source.gauges, owner)
    for sample in (
        Sample("eplb_metrics_errors_total", _errors[0]),
        Sample("eplb_updated_timestamp_seconds", time.time()),
        Sample("eplb_build_info", 1, labels=(__version__,)),
    ):
        _add(told, sample)
    return told


def metrics_text() -> str:
    """What does this process know that an operator would like to see? In Prometheus' text format, version 0.0.4.

    Serve it as `/metrics`; docs/metrics.md says what each number means and what to alert on. Engines that have
    prometheus_client get the same numbers from `eplb_core.adapters.prometheus.publish`.

    Returns:
        Lines of HELP, TYPE and samples; metrics of which nothing is known are left out.

    Cost:
        A millisecond for each model that was placed since it was last asked, else microseconds. Takes no lock that the
        forward thread waits for.

    Threads:
        Any.

    Example:
        >>> from eplb_core import metrics_text
        >>> [line for line in metrics_text().splitlines() if "eplb_build_info " in line][-1]
        '# TYPE eplb_build_info gauge'
    """
    rows: dict[str, list[str]] = {}
    for (name, labels), value in samples().items():
        named = zip(("rank", *METRICS[name].labels), labels, strict=True)
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in named if text)
        number = int(value) if value == int(value) else value
        rows.setdefault(name, []).append(f"{name}{f'{{{shown}}}' if shown else ''} {number!r}\n")
    return "".join(
        f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n{''.join(sorted(rows[metric.name]))}"
        for metric in METRICS.values()
        if metric.name in rows
    )


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _fold_finished() -> None:
    """Keep what owners that are gone have counted; under the lock."""
    alive: list[_Source] = []
    gone: list[_Source] = []
    for source in _sources:
        (gone if source.owner() is None else alive).append(source)
    _sources[:] = alive
    for source in gone:  # off the list before: what they call may come here again
        _tell(_finished, source.counters)


def _tell(told: dict[Key, float], numbers: Callable[..., Iterable[Sample]], *owner: object) -> None:
    """Add what a function gives, or nothing of it where it raises."""
    try:
        more: dict[Key, float] = {}
        for sample in numbers(*owner):
            _add(more, sample)
    except Exception as error:
        _errors[0] += 1
        what = f"{getattr(numbers, '__qualname__', type(numbers).__name__)}: {plain(error)}"
        if what not in _logged and len(_logged) < 100:
            _logged.add(what)
            logging.getLogger("eplb_core").warning("eplb_core: numbers for operators are left out: %s", what)
        return
    for key, value in more.items():
        _join(told, key, value)


def _add(told: dict[Key, float], sample: Sample) -> None:
    metric, value = METRICS[sample.name], float(sample.value)
    if len(sample.labels) != len(metric.labels):
        raise ValueError(f"{sample.name} has the labels {metric.labels}, not {len(sample.labels)} of them")
    if not math.isfinite(value):
        return
    rank = _rank[0] if sample.rank is None else sample.rank
    _join(told, (sample.name, ("" if rank is None else str(rank), *map(str, sample.labels))), value)


def _join(told: dict[Key, float], key: Key, value: float) -> None:
    if METRICS[key[0]].kind == "counter":
        told[key] = told.get(key, 0.0) + value
    else:
        told[key] = max(told.get(key, value), value)


# ---- balance ---------------------------------------------------------------------------------------------------------


class Placements:
    """How balanced the last placement of each model found the ranks, and what it promised.

    `note` costs microseconds; the balance that was seen is computed when somebody asks.

    Example:
        >>> placements = Placements()
        >>> placements.note("1x4", lambda: 0.5, 0.9, 1.0)
        >>> [(sample.name, sample.value) for sample in placements.gauges()][0]
        ('eplb_balancedness_seen_ratio', 0.5)
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[Callable[[], float], float, float]] = {}
        self._seen: dict[str, tuple[Callable[[], float], float]] = {}
        self._counted: dict[str, int] = {}
        self._process = 0

    def note(self, model: str, seen: Callable[[], float], predicted: float, bound: float) -> None:
        """Remember a placement.

        Args:
            model: What tells this model from others of the process: layers x experts.
            seen: Computes the balancedness of the window under the live map; NaN = not known.
            predicted: That of the new map, mean over layers; NaN = not known.
            bound: That of the best map.
        """
        if self._process != os.getpid():  # an engine may make it, fork, and place in the child
            self._process, self._counted = os.getpid(), {}
            watch(self, counters=partial(_count_placements, self._counted), gauges=Placements.gauges)
        self._last[model] = seen, predicted, bound
        self._counted[model] = self._counted.get(model, 0) + 1

    def gauges(self) -> list[Sample]:
        """The last placement of each model."""
        told = []
        for model, (seen, predicted, bound) in list(self._last.items()):
            known = self._seen.get(model)
            if known is None or known[0] is not seen:
                known = self._seen[model] = seen, seen()
            for what, value in (("seen", known[1]), ("predicted", predicted), ("bound", bound)):
                told.append(Sample(f"eplb_balancedness_{what}_ratio", value, None, (model,)))
        return told


def _count_placements(counted: dict[str, int]) -> list[Sample]:
    return [Sample("eplb_placements_total", number, None, (model,)) for model, number in list(counted.items())]
