"""Numbers for operators: what owners tell, what is left of them when they are gone, and the text."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eplb_core
from eplb_core import Balancer, ExpertLayout, Topology, exposition
from eplb_core.exposition import METRICS, Placements, Sample, samples, watch
from tests.processes import python

pytestmark = pytest.mark.usefixtures("own_numbers")
READ, OFF = "eplb_read_bytes_total", "eplb_moves_off"


class Owner:
    """Something with one number of each kind."""

    def __init__(self, rank: int | None, count: float, now: float = 0.0) -> None:
        counted = [Sample(READ, count, rank)]
        self.told: Any = [Sample(OFF, now, rank)]
        watch(self, counters=lambda: counted, gauges=lambda owner: owner.told)


def test_counters_add_up_and_outlive_their_owner_and_gauges_are_the_largest() -> None:
    owners = [Owner(0, 5.0, 1.0), Owner(0, 7.0), Owner(1, 2.0)]
    told = samples()
    assert [told[READ, (rank,)] for rank in "01"] == [12.0, 2.0]
    assert [told[OFF, (rank,)] for rank in "01"] == [1.0, 0.0]
    del owners[0]
    gc.collect()
    for _ in range(2):
        told = samples()
        assert told[READ, ("0",)] == 12.0
        assert told[OFF, ("0",)] == 0.0
    del owners[:]
    gc.collect()
    assert (READ, ("1",)) in samples()
    assert (OFF, ("1",)) not in samples()
    assert exposition._sources == []


def test_a_function_that_is_asked_may_itself_watch_something() -> None:
    """FD9: it waited for itself, for ever."""
    made: list[Owner] = []

    def counters() -> list[Sample]:
        if not made:
            made.append(Owner(0, 4.0))
            samples()
        return [Sample(READ, 3.0, 0)]

    owner: list[Any] = [Owner(0, 1.0)]
    watch(owner[0], counters=counters)
    owner.clear()
    gc.collect()
    asked = threading.Thread(target=samples, daemon=True)
    asked.start()
    asked.join(20.0)
    assert not asked.is_alive()
    assert samples()[READ, ("0",)] == 8.0


def test_what_does_not_know_its_rank_has_that_of_the_process() -> None:
    owner = Owner(None, 3.0)
    assert samples()[READ, ("",)] == 3.0
    assert f"{READ} 3\n" in eplb_core.metrics_text()
    exposition.set_rank(6)
    assert f'{READ}{{rank="6"}} 3\n' in eplb_core.metrics_text()
    del owner


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_that_has_no_text_is_counted_too() -> None:
    def wrong(_: Owner) -> list[Sample]:
        raise _Unprintable

    owner = Owner(0, 5.0)
    watch(owner, gauges=wrong)
    told = samples()
    assert (told[READ, ("0",)], told["eplb_metrics_errors_total", ("",)]) == (5.0, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        [Sample("eplb_nobody_knows_total", 1.0)],
        [Sample("eplb_part_active", 1.0)],
        [Sample(OFF, "many")],  # type: ignore[arg-type]
        [None],
        None,
    ],
)
def test_an_owner_that_raises_costs_its_own_numbers_alone(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Owner(0, 5.0), Owner(1, 2.0)
    bad.told = [Sample(READ, 9.0), *wrong] if wrong is not None else wrong  # nothing of a half is told
    for asked in (1, 2):
        told = samples()
        assert (told[READ, ("0",)], told[READ, ("1",)]) == (5.0, 2.0)
        assert (READ, ("",)) not in told
        assert told["eplb_metrics_errors_total", ("",)] == asked
    assert len(caplog.messages) == 1
    del good


def test_what_is_not_a_number_is_left_out() -> None:
    owner = Owner(0, 5.0, math.nan)
    assert (OFF, ("0",)) not in samples()
    owner.told = [Sample(OFF, math.inf, 0), Sample(OFF, 0.5, 1)]
    assert [key for key in samples() if key[0] == OFF] == [(OFF, ("1",))]


def test_owners_may_come_and_be_asked_on_any_thread() -> None:
    kept: list[Owner] = []

    def run() -> None:
        for at in range(50):
            kept.append(Owner(0, 1.0)) if at % 2 else Owner(0, 1.0)
            if at % 10 == 0:
                samples()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert samples()[READ, ("0",)] == 200.0
    assert len(exposition._sources) == 100


def test_a_forked_child_begins_anew_and_never_waits_for_its_parent() -> None:
    owner = Owner(0, 5.0)
    placements = Placements()
    placements.note("1x4", lambda: 0.5, 0.9, 1.0)
    with exposition._lock:  # as where another thread is asked meanwhile
        child = os.fork()
        if not child:
            placements.note("1x4", lambda: 0.5, 0.9, 1.0)
            told = samples()
            good = (READ, ("0",)) not in told and told["eplb_placements_total", ("", "1x4")] == 1.0
            os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert samples()[READ, ("0",)] == 5.0
    del owner


# ---- balance ---------------------------------------------------------------------------------------------------------


def test_the_balance_that_was_seen_is_computed_once_and_only_if_somebody_asks() -> None:
    asked: list[str] = []

    def seen() -> float:
        asked.append("")
        return 0.5

    placements = Placements()
    placements.note("2x4", seen, 0.75, math.nan)
    assert asked == []
    for _ in range(2):
        told = samples()
        assert told["eplb_balancedness_seen_ratio", ("", "2x4")] == 0.5
        assert told["eplb_balancedness_predicted_ratio", ("", "2x4")] == 0.75
        assert ("eplb_balancedness_bound_ratio", ("", "2x4")) not in told
    assert len(asked) == 1
    placements.note("2x4", lambda: 0.25, 0.75, 1.0)
    told = samples()
    assert told["eplb_balancedness_seen_ratio", ("", "2x4")] == 0.25
    assert told["eplb_placements_total", ("", "2x4")] == 2.0


@pytest.mark.parametrize(("dispatch", "seen"), [("even", 60 / 100), ("weighted", 60 / 90)])
def test_a_balancer_tells_what_it_saw_and_what_it_promised(dispatch: str, seen: float) -> None:
    topology = Topology(num_ranks=2)
    live = ExpertLayout.trivial(1, 4, num_slots=6, topology=topology)
    balancer = Balancer(topology, num_slots=6, dispatch=dispatch)
    load = np.array([[10.0, 10.0, 90.0, 10.0]])
    balancer.propose(live)
    assert not [name for name, _ in samples() if name.startswith("eplb_balancedness")]
    for _ in range(4):
        balancer.observe(load)
    placed = balancer.propose(live)
    told = samples()
    assert told["eplb_balancedness_seen_ratio", ("", "1x4")] == pytest.approx(seen)
    assert told["eplb_balancedness_predicted_ratio", ("", "1x4")] == pytest.approx(float(placed.balancedness[0]))
    assert told["eplb_balancedness_bound_ratio", ("", "1x4")] == pytest.approx(float(placed.bound[0]))
    assert told["eplb_placements_total", ("", "1x4")] == 1.0


# ---- the text --------------------------------------------------------------------------------------------------------


def everything() -> list[Sample]:
    """A number of each metric, with labels that need care."""
    own = {"eplb_metrics_errors_total", "eplb_updated_timestamp_seconds", "eplb_build_info"}
    hard = 'a "b"\\\n\u00e9'
    return [Sample(name, 0.1 + at, 3, (hard,) * len(m.labels)) for at, (name, m) in enumerate(METRICS.items())
            if name not in own]  # fmt: skip


def test_prometheus_own_parser_reads_the_text_as_it_was_told() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    owner = Owner(0, 0.0)
    told = everything()

    def tell(kind: str) -> Iterable[Sample]:
        return [sample for sample in told if METRICS[sample.name].kind == kind]

    watch(owner, counters=lambda: tell("counter"), gauges=lambda _: tell("gauge"))
    families = list(parser.text_string_to_metric_families(eplb_core.metrics_text()))
    names = [f"{family.name}_total" if family.type == "counter" else family.name for family in families]
    assert names == list(METRICS)
    found = {(each.name, tuple(each.labels.items())): each.value for family in families for each in family.samples}
    for sample in told:
        labels = zip(("rank", *METRICS[sample.name].labels), ("3", *sample.labels), strict=True)
        assert found[sample.name, tuple(labels)] == sample.value
    for family, name in zip(families, names, strict=True):
        assert (family.type, family.documentation) == (METRICS[name].kind, METRICS[name].help)


def test_names_are_as_prometheus_wants_them() -> None:
    for name, metric in METRICS.items():
        assert name.startswith("eplb_")
        assert name.replace("_", "").islower()
        assert name.endswith("_total") == (metric.kind == "counter")
        assert "rank" not in metric.labels


def test_without_anything_that_tells_there_is_still_a_text_and_neither_torch_nor_prometheus_is_asked() -> None:
    program = """
        import sys, eplb_core
        print(eplb_core.metrics_text())
        assert not {"torch", "numpy", "prometheus_client"} & {*sys.modules}
    """
    lines = python("\n".join(line.strip() for line in program.splitlines())).stdout.splitlines()
    assert [line.split()[0].partition("{")[0] for line in lines if line and line[0] != "#"] == [
        "eplb_metrics_errors_total",
        "eplb_updated_timestamp_seconds",
        "eplb_build_info",
    ]


# ---- the dashboard and the page --------------------------------------------------------------------------------------

DOCS = Path(eplb_core.__file__).parents[1] / "docs"
PAGE, BOARD = DOCS / "metrics.md", DOCS / "grafana.json"
WORDS = {"by", "count", "increase", "max", "min", "or", "rate", "sum", "time"}
LABELS = {"cause", "instance", "job", "model", "part", "rank", "version"}


def check_expression(expression: str) -> set[str]:
    """The metrics that it names; it must close what it opens, and name metrics, labels and functions that there are."""
    bare = re.sub(r'"[^"]*"|\$__rate_interval|\[\w+\]', "", expression)
    for opening, closing in ("()", "{}", "[]"):
        assert bare.count(opening) == bare.count(closing), expression
    named = {*re.findall(r"[a-z_][a-z_0-9]*", bare)} - WORDS - LABELS
    assert named <= {*METRICS}, expression
    for name, selector in re.findall(r"(eplb_\w+)\{([^}]*)\}", expression):
        labels = {*re.findall(r"(\w+)[=!]~?", selector)}
        assert labels <= {"job", "instance", "rank", *METRICS[name].labels}, expression
    for metric in named:
        over_time = re.search(rf"(rate|increase)\({metric}\b", expression)
        assert bool(over_time) == (METRICS[metric].kind == "counter"), expression
    return named


def test_every_panel_shows_a_number_that_there_is_and_every_number_has_a_panel() -> None:
    board = json.loads(BOARD.read_text("utf-8"))
    assert board["schemaVersion"] >= 36
    assert board["uid"]
    assert [each["name"] for each in board["templating"]["list"]] == ["datasource", "job"]
    panels, shown, taken = board["panels"], set[str](), set[tuple[int, int]]()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"]
        assert panel["description"]
        place = panel["gridPos"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= 24
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for target in panel["targets"]:
            found = check_expression(target["expr"])
            assert found
            shown |= found
            labels = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
            kept = re.search(r"by \(([^)]*)\)", target["expr"])
            assert labels <= ({*kept[1].split(", ")} if kept else set())
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
    assert shown == {*METRICS}


def test_the_page_has_a_row_for_each_metric_and_words_for_each_alert() -> None:
    yaml = pytest.importorskip("yaml")
    text = PAGE.read_text("utf-8")
    rows = re.findall(r"^\| `(eplb_\w+)` \| (\w+) \|(?: (\S+))? \| ", text, re.M)
    assert rows == [
        (name, metric.kind, ", ".join(f"`{label}`" for label in metric.labels)) for name, metric in METRICS.items()
    ]
    (group,) = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])["groups"]
    for rule in group["rules"]:
        assert check_expression(rule["expr"])
        assert f"| {rule['alert']} | " in text
    assert 3 <= len(group["rules"]) <= 6
