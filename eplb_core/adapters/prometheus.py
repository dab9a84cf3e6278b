"""The numbers of `metrics_text` through prometheus_client, which serves the engine's own `/metrics`.

Where `PROMETHEUS_MULTIPROC_DIR` is set (SGLang sets it with `--enable-metrics`, vLLM with several API servers, else the
operator does) prometheus_client keeps numbers in files there, and the process that serves adds them up. Nothing is
computed at a scrape then, so a thread writes them every few seconds. Without the variable they are computed at each
scrape, and seen where the process that has them serves itself.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
from collections.abc import Iterator
from typing import Any

from eplb_core._arrays import check_real
from eplb_core.adapters import hooking
from eplb_core.exposition import METRICS, Key, samples

INTERVAL_S = 5.0
"""Seconds between two writes."""
_ROOM = 1 << 20
"""Bytes that must be free: to write into a file that is mapped and cannot grow ends the process."""
_published: list[Publisher | Collector] = []


class Publisher:
    """Writes the numbers into prometheus_client's files, every `interval` seconds, on a thread of its own.

    Args:
        interval: Seconds; `math.inf`: only when `refresh` is called.

    Raises:
        OSError: There is no such folder, or no room in it.
    """

    def __init__(self, interval: float) -> None:
        import prometheus_client

        folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
        free = shutil.disk_usage(folder).free
        if free < _ROOM:
            raise OSError(f"PROMETHEUS_MULTIPROC_DIR (={folder}) must have {_ROOM} bytes free, not {free}")
        # In no registry: what serves reads the files, and would tell those of its own process twice.
        make: dict[str, Any] = {"counter": prometheus_client.Counter, "gauge": prometheus_client.Gauge}
        modes: dict[str, dict[str, Any]] = {"counter": {}, "gauge": {"multiprocess_mode": "livemostrecent"}}
        self._metrics = {
            each.name: make[each.kind](each.name, each.help, ("rank", *each.labels), registry=None, **modes[each.kind])
            for each in METRICS.values()
        }
        self._written: dict[Key, float] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._interval = None if interval == math.inf else interval
        self.refresh()
        self._thread = threading.Thread(target=self._run, name="eplb-metrics", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """Write the numbers as they are now; raises nothing."""
        with self._lock:
            for key, value in samples().items():
                self._write(key, value)

    def _write(self, key: Key, value: float) -> None:
        name, labels = key
        try:
            child, before = self._metrics[name].labels(*labels), self._written.get(key, 0.0)
            if METRICS[name].kind == "gauge":
                child.set(value)
            else:
                child.inc(max(value - before, 0.0))
                self._written[key] = max(value, before)
        except Exception as error:  # such as a folder that is gone: the other metrics may have their file
            hooking.log_once(f"metrics: {name} is not written: {hooking.words(error)}")

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            self.refresh()

    def close(self) -> None:
        """Write a last time and end the thread."""
        self._closed.set()
        self._thread.join()
        self.refresh()


class Collector:
    """Computes the numbers when prometheus_client's registry asks."""

    def describe(self) -> list[Any]:
        """Nothing, so that registering asks for no numbers."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield one family for each metric of which something is known."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        make: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        families: dict[str, Any] = {}
        for (name, labels), value in samples().items():
            metric = METRICS[name]
            if name not in families:
                families[name] = make[metric.kind](name, metric.help, labels=("rank", *metric.labels))
            families[name].add_metric(labels, value)
        yield from families.values()


def publish(interval: float = INTERVAL_S) -> Publisher | Collector | None:
    """Give this process's numbers to prometheus_client from now on; the plug-ins call it when the model is loaded.

    Call it in the process of each rank, and not before the engine has set `PROMETHEUS_MULTIPROC_DIR`: it imports
    prometheus_client, which looks at the variable once.

    Args:
        interval: Seconds between two writes, where there are files to write.

    Returns:
        What gives them; the same one when it is called again. None where prometheus_client is not installed, or raised:
        a line in the log says so, and `metrics_text` still has them.

    Raises:
        ValueError: `interval` is not above 0.
    """
    if interval != math.inf:
        check_real(interval, "interval", above=0.0)
    if _published:
        return _published[0]
    try:
        from prometheus_client import REGISTRY, values

        if values.ValueClass is values.MutexValue:
            collector = Collector()
            REGISTRY.register(collector)
            _published.append(collector)
            unset = "PROMETHEUS_MULTIPROC_DIR" not in os.environ
            why = "is not set" if unset else "was set after prometheus_client had been imported"
            hooking.log_once(
                f"metrics: PROMETHEUS_MULTIPROC_DIR {why}: /metrics has eplb_... only where this process serves it",
                logging.INFO if unset else logging.WARNING,
            )
        else:
            _published.append(Publisher(interval))
    except Exception as error:
        level = logging.INFO if isinstance(error, ModuleNotFoundError) else logging.WARNING
        hooking.log_once(f"metrics: not given to prometheus_client: {hooking.words(error)}", level)
        return None
    return _published[0]


def _forget() -> None:
    """In a forked child, which has no thread that writes: it may publish anew."""
    _published[:] = [each for each in _published if isinstance(each, Collector)]


os.register_at_fork(after_in_child=_forget)
