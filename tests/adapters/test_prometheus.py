"""The numbers through prometheus_client: files of several processes behind one /metrics, a registry, and faults."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eplb_core import exposition
from eplb_core.adapters import hooking, prometheus
from eplb_core.exposition import METRICS, Sample, watch
from tests.loading.engine_process import end, spawn
from tests.processes import python

client: Any = pytest.importorskip("prometheus_client")
pytestmark = pytest.mark.usefixtures("own_numbers")
READ, OFF = "eplb_read_bytes_total", "eplb_moves_off"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The registry of a process that serves itself; nothing was published in it."""
    monkeypatch.setattr(prometheus, "_published", [])
    made = client.CollectorRegistry()
    monkeypatch.setattr(client, "REGISTRY", made)
    return made


class Owner:
    def __init__(self) -> None:
        counted = self.counted = [Sample(READ, 5.0, 0)]
        watch(self, counters=lambda: counted, gauges=lambda _: [Sample(OFF, 1.0, 0)])


# ---- two ranks behind one /metrics -----------------------------------------------------------------------------------


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Two ranks that keep their numbers in `tmp_path / "numbers"`."""
    pytest.importorskip("torch", reason="ranks agree over gloo")
    folder = tmp_path / "numbers"
    folder.mkdir()
    command = [sys.executable, "-m", "tests.adapters.prometheus_process", str(tmp_path)]
    process = spawn(*command, OMP_NUM_THREADS="1", PROMETHEUS_MULTIPROC_DIR=str(folder))
    yield process
    end(process)


@contextmanager
def served(folder: Path) -> Iterator[Callable[[], dict[Any, float]]]:
    """Reads a page that prometheus_client serves from files: numbers by name, rank and further labels."""
    from prometheus_client import multiprocess, parser

    registry = client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(folder))
    server, thread = client.start_http_server(0, "127.0.0.1", registry)

    def read() -> dict[Any, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as page:
            families = parser.text_string_to_metric_families(page.read().decode())
        found = [each for family in families for each in family.samples]
        return {(each.name, each.labels.pop("rank"), *each.labels.values()): each.value for each in found}

    try:
        yield read
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
def test_one_page_has_the_numbers_of_all_ranks_as_they_were_counted(
    engine: subprocess.Popen[str], tmp_path: Path
) -> None:
    from prometheus_client import multiprocess

    assert engine.stdout
    assert engine.stdin
    moved = {each["rank"]: each for each in (json.loads(engine.stdout.readline()) for _ in range(2))}
    with served(tmp_path / "numbers") as read:
        told = read()
        assert {name for name, *_ in told} <= {*METRICS}
        for rank, each in ((str(rank), each) for rank, each in moved.items()):
            assert told[READ, rank] == each["bytes"] > 0
            assert told["eplb_read_seconds_total", rank] == pytest.approx(each["read_s"])
            assert told["eplb_experts_received_total", rank] >= each["received"] > 0  # those of the paused one, too
            assert told["eplb_updated_timestamp_seconds", rank] >= each["since"]
            assert told["eplb_part_active", rank, "moves"] == 1.0
            assert told["eplb_part_active", rank, "record"] == 0.0
            ended = "eplb_migrations_total"
            by_cause = {labels[0]: n for (name, of, *labels), n in told.items() if (name, of) == (ended, rank)}
            assert (by_cause.pop("done"), by_cause.pop("paused")) == (5.0, 1.0)
            assert set(by_cause.values()) == {0.0}
        assert told["eplb_layers_installed_total", "0"] == told["eplb_layers_installed_total", "1"] >= 10.0
        engine.stdin.close()
        assert engine.wait(timeout=60) == 0
        for each in moved.values():
            multiprocess.mark_process_dead(each["pid"], str(tmp_path / "numbers"))
        after = read()
        assert after[READ, "1"] == moved[1]["bytes"]
        assert not [name for name, *_ in after if METRICS[name].kind == "gauge"]


def test_files_get_what_was_counted_since_and_a_metric_that_cannot_be_written_costs_itself_alone(
    tmp_path: Path,
) -> None:
    program = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from eplb_core.adapters import prometheus
from eplb_core.exposition import Sample, watch
class Owner: told = [Sample("eplb_read_bytes_total", 5.0, 0)]
owner = Owner()
watch(owner, counters=lambda: Owner.told, gauges=lambda _: [Sample("eplb_moves_off", 1.0, 0)])
publisher = prometheus.publish(float("inf"))
assert publisher is prometheus.publish()
def page():
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return generate_latest(registry).decode().splitlines()
assert 'eplb_read_bytes_total{rank="0"} 5.0' in page()
publisher._metrics["eplb_moves_off"] = None
for count in (5.0, 8.0, 3.0, 9.5):
    Owner.told = [Sample("eplb_read_bytes_total", count, 0)]
    publisher.refresh()
found = page()
assert 'eplb_read_bytes_total{rank="0"} 9.5' in found, found
assert 'eplb_moves_off{rank="0"} 1.0' in found, found
publisher.close()
assert not publisher._thread.is_alive()
import os
for folder, room in (("/nowhere", 0), (os.environ["PROMETHEUS_MULTIPROC_DIR"], 1 << 62)):
    prometheus._published.clear()
    os.environ["PROMETHEUS_MULTIPROC_DIR"], prometheus._ROOM = folder, room
    assert prometheus.publish() is None
"""
    said = python(program, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)).stderr.splitlines()
    assert [line.partition("metrics: ")[2].partition(":")[0] for line in said[-2:]] == [
        "not given to prometheus_client"
    ] * 2


# ---- a process that serves itself, and one that has no client --------------------------------------------------------


def test_a_process_that_serves_itself_computes_the_numbers_at_each_scrape(
    registry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner()
    made = prometheus.publish()
    assert isinstance(made, prometheus.Collector)
    assert prometheus.publish() is made
    assert "PROMETHEUS_MULTIPROC_DIR is not set" in caplog.text
    text = client.generate_latest(registry).decode()
    assert f'{READ}{{rank="0"}} 5.0\n' in text
    assert f'{OFF}{{rank="0"}} 1.0\n' in text
    assert f"# TYPE {READ} counter\n" in text
    owner.counted[0] = Sample(READ, 6.0, 0)
    assert f'{READ}{{rank="0"}} 6.0\n' in client.generate_latest(registry).decode()
    owner.counted[0] = None  # type: ignore[call-overload]
    text = client.generate_latest(registry).decode()
    assert READ not in text
    assert f'{OFF}{{rank="0"}} 1.0\n' in text
    assert 'eplb_metrics_errors_total{rank=""} 1.0\n' in text


def test_a_folder_that_is_set_too_late_is_said(
    registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    assert isinstance(prometheus.publish(), prometheus.Collector)
    assert caplog.records[-1].levelname == "WARNING"
    assert "after prometheus_client had been imported" in caplog.text


def test_without_prometheus_client_the_engine_serves_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert prometheus.publish() is None
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("interval", [0.0, -1.0, math.nan, -math.inf, "5"])
def test_an_interval_must_be_one(interval: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="interval"):
        prometheus.publish(interval)
    assert prometheus._published == []


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_parts_are_told_with_how_often_the_engine_stood_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours() -> None:
        raise ValueError("no")

    hooking.tell_parts({"maps": True, "fold": False}, 3)
    call = hooking.guarded(ours, hooking.do_nothing, "maps")
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    hooking.tell_parts({"fold": True})
    told = exposition.samples()
    assert {labels: told["eplb_part_active", ("3", labels)] for labels in ("maps", "fold")} == {"maps": 1, "fold": 1}
    assert {labels: told["eplb_fallbacks_total", ("3", labels)] for labels in ("maps", "fold")} == {
        "maps": 3,
        "fold": 0,
    }
