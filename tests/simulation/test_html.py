"""Replays, layouts and plans as HTML; the page is opened in a real browser where there is one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_core import (
    CostModel,
    ExpertLayout,
    StepCost,
    Topology,
    Trace,
    compare_policies,
    gain_report,
    place,
    plan_pull,
    should_rebalance,
)
from eplb_core._html import line_svg, words_html
from eplb_core.simulation import Comparison
from eplb_core.simulation.html import report_html, write_report
from eplb_core.simulation.result import averaged

TOPOLOGY = Topology(4, 2)
LOAD = np.random.default_rng(0).integers(1, 90, (9, 3, 8))


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    trace = Trace(LOAD, layer_ids=(3, 4, 5))
    return compare_policies(trace, ["none", "place"], topology=TOPOLOGY, num_slots=12, interval=3, bound=True)


class Tags(HTMLParser):
    """Opening tags and their attributes; a tag that is closed out of order raises."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def test_the_page_holds_the_numbers_of_the_replays(comparison: Comparison) -> None:
    data = data_of(report_html(comparison))
    assert [policy["name"] for policy in data["policies"]] == ["none", "place"]
    assert (data["step"], data["unscored"], data["best"]) == (1, 3, 1)
    place, sim = data["policies"][1], comparison["place"]
    assert place["curve"] == pytest.approx(sim.window_balancedness.tolist(), rel=1e-3)
    assert data["bound"] == pytest.approx(sim.bound.tolist(), rel=1e-3)
    assert np.shape(place["ranks"]) == (9, 4)
    assert [row["layer"] for row in place["layers"]] == [3, 4, 5]
    assert place["layers"][1]["balancedness"] == pytest.approx(sim.balancedness[3:, 1].mean(), rel=1e-3)
    assert place["layers"][1]["worst"] == pytest.approx(sim.balancedness[3:, 1].min(), rel=1e-3)
    assert sum(row["transfers"] for row in place["layers"]) == sim.total_transfers
    assert place["moves"] == sim.rebalance_windows[sim.transfers.sum(axis=1) > 0].tolist()


def test_the_page_loads_nothing_and_keeps_foreign_text_text(comparison: Comparison, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    renamed = Comparison(
        compare_policies(LOAD, {evil: "none"}, topology=TOPOLOGY, num_slots=12, interval=3).simulations
    )
    for each, title in ((comparison, evil), (renamed, "x")):
        page = report_html(each, title=title)
        tags = Tags(page).found
        assert [tag for tag, _ in tags].count("script") == 2
        assert not [attributes for _, attributes in tags if {"src", "href"} & attributes.keys()]
        assert "@import" not in page
        assert "url(" not in page
        assert re.findall(r"https?://[^\s\"']+", page) == ["http://www.w3.org/2000/svg"] * page.count("http")
    assert data_of(report_html(renamed))["policies"][0]["name"] == evil
    assert "<h1>@DATA@ @TITLE@ @</h1>" in report_html(comparison, title="@DATA@ @TITLE@ @")
    write_report(comparison, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == report_html(comparison)


def test_windows_without_load_are_gaps() -> None:
    load = LOAD.copy()
    load[4] = load[:, 2] = 0
    data = data_of(report_html(compare_policies(load, "none", topology=TOPOLOGY, num_slots=12, interval=3)))
    assert data["bound"] is None
    assert data["policies"][0]["curve"][4] is None
    assert data["policies"][0]["ranks"][4] == [None] * 4
    assert data["policies"][0]["layers"][2]["worst"] is None


def test_what_a_screen_cannot_show_is_averaged() -> None:
    values = np.array([1.0, 3.0, np.nan, 5.0, np.nan])
    assert averaged(values, 2).tolist()[:2] == [2.0, 5.0]
    assert np.isnan(averaged(values, 2)[2])
    load = np.tile(LOAD, (100, 1, 1))
    data = data_of(report_html(compare_policies(load, "none", topology=TOPOLOGY, num_slots=12, interval=450)))
    assert (data["step"], len(data["policies"][0]["curve"])) == (3, 300)


# ---- a real browser --------------------------------------------------------------------------------------------------

# Sorts by balancedness, points at the curves and at the heat map, takes the other policy; writes down what came of it.
ACTIONS = """
<script>
const seen = {ready: document.body.dataset.ready};
const cells = () => [...document.querySelectorAll("#layers tbody tr")].map(row => row.cells[1].textContent);
const at = (target, x, y) => {
  const box = target.getBoundingClientRect();
  const where = {clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true};
  target.dispatchEvent(new MouseEvent("mousemove", where));
  return document.getElementById("tip").textContent;
};
document.querySelector("th[data-key=balancedness]").click(); seen.ascending = cells();
document.querySelector("th[data-key=balancedness]").click(); seen.descending = cells();
seen.curve = at(document.getElementById("curves"), 0.5, 0.5);
seen.heat = at(document.getElementById("heat"), 0.99, 0.01);
const picker = document.getElementById("policy");
picker.value = "0"; picker.dispatchEvent(new Event("change")); seen.other = cells();
seen.rows = [...document.querySelectorAll("#layers tr")].map(row => [...row.cells].map(cell => cell.textContent));
seen.paths = document.querySelectorAll("#curves path").length;
document.body.textContent = "SEEN" + JSON.stringify(seen) + "NEES";
</script>
</body>
"""


def browser() -> str:
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
    for name in names:
        path = shutil.which(name) if name else None
        if path:
            return path
    pytest.skip("needs chromium (Debian's package), or its path in CHROMIUM")


def shown_by_browser(html: str, folder: Path) -> Any:
    """What `ACTIONS` saw on the page."""
    page = folder / "page.html"
    page.write_text(html.replace("</body>\n", ACTIONS))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [browser(), *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode and not done.stdout:
        pytest.skip(f"chromium does not start here: {done.stderr[-200:]}")
    found = re.search("SEEN(.*)NEES", done.stdout.split("<body")[-1], re.S)
    assert found, done.stdout[-2000:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.slow
@pytest.mark.long
def test_the_page_works_in_a_browser(comparison: Comparison, tmp_path: Path) -> None:
    seen = shown_by_browser(report_html(comparison), tmp_path)
    assert seen["ready"] == "yes"
    ascending = [float(text) for text in seen["ascending"]]
    assert ascending == sorted(ascending) == [float(text) for text in reversed(seen["descending"])]
    assert seen["curve"].splitlines()[0] == "window 4"
    assert [line.split()[0] for line in seen["curve"].splitlines()[1:]] == ["none", "place", "bound"]
    assert seen["heat"].startswith("window 8\nrank 0\n")
    assert sorted(seen["other"]) != sorted(seen["ascending"])
    assert seen["paths"] == 3


@pytest.mark.slow
@pytest.mark.long
def test_the_page_shows_large_and_small_numbers_as_they_are(tmp_path: Path) -> None:
    load = np.array([[[2000, 2000, 1000, 1000]]] * 6)  # the fuller rank has 4,000 tokens
    options: dict[str, Any] = {"topology": Topology(2), "num_slots": 4, "interval": 3}
    for cost, unit, time in (
        (None, "tokens of the fullest rank", "4000"),
        (CostModel(token_s=3e-8), "ms per pass", "0.12"),
    ):
        seen = shown_by_browser(report_html(compare_policies(load, "none", cost=cost, **options)), tmp_path)
        assert seen["rows"][0][3] == unit
        assert seen["rows"][1] == ["0", "0.75", "0.75", time, "0", "0"]


# ---- notebooks -------------------------------------------------------------------------------------------------------


def test_replays_show_totals_curves_and_the_conclusion(comparison: Comparison) -> None:
    html = comparison._repr_html_()
    Tags(html)
    assert html.count("<tr>") == 3
    assert html.count("<path") == 2
    assert all(f"&#8212;</b> {sim.policy}</span>" in html for sim in comparison)  # which curve is whose
    assert "Take <code>place</code>" in html
    alone = comparison["place"]._repr_html_()
    Tags(alone)
    assert f"{comparison['place'].total_balancedness:.3f}" in alone
    cost = StepCost(CostModel(expert_bytes=1e9))
    priced = compare_policies(LOAD, "place", topology=TOPOLOGY, num_slots=12, interval=3, cost=cost)._repr_html_()
    assert "GB per rank" in priced
    assert "GB per rank" not in html


def test_a_layout_shades_replicas_and_marks_pairs_on_a_rank() -> None:
    layout = ExpertLayout([[0, 1, 0, 2, 3, 3, -1, 0]] * 10, 4, topology=TOPOLOGY)
    html = layout._repr_html_()
    Tags(html)
    assert "2 more layers" in html
    assert layout.digest[:12] in html
    assert "white-space:nowrap" in html  # else "layer 0" takes two lines, and so does each row
    assert html.count("#f88") == 8 * 2  # expert 3, twice on rank 2
    assert html.count("#aaa") == 8 * 3  # three replicas of expert 0
    assert html.count(">-</td>") == 8
    empty = ExpertLayout(np.zeros((0, 4), np.int64), 4, topology=TOPOLOGY)._repr_html_()
    assert "0 layers" in empty
    assert "<table" not in empty
    wide = ExpertLayout.trivial(1, 512, num_slots=1024, topology=Topology(128))._repr_html_()
    assert "more ranks" in wide


def test_a_pull_plan_counts_what_is_kept_copied_and_read() -> None:
    old = ExpertLayout([[0, 1, 2, 3, 1, 2]] * 9, 4, topology=Topology(2))
    new = ExpertLayout([[0, 1, 2, 3, 0, 0]] * 9, 4, topology=Topology(2))
    html = plan_pull(old, new, rank=1)._repr_html_()
    Tags(html)
    assert "<tr><td>all</td><td>9</td><td>0</td><td>9</td><td>9</td><td>0</td><td>0</td></tr>" in html
    assert "1 more layers" in html


def test_curves_leave_gaps_out() -> None:
    assert line_svg([np.array([np.nan])]) == ""
    drawn = line_svg([np.array([0.5, 0.5, np.nan, 1.0, 1.0]), np.array([0.5])])
    assert [path.count("M") for path in re.findall(r'd="([^"]*)"', drawn)] == [2, 1]


def test_placements_verdicts_and_reports_show_what_they_are() -> None:
    live = place(LOAD[0], TOPOLOGY, num_slots=12).layout
    placement = place(LOAD, TOPOLOGY, num_slots=12, current=live, dispatch="weighted", transfer_price=0.0)
    shown = placement._repr_html_()
    assert "<b>Placement</b> for weighted dispatch" in shown
    assert f"{int(placement.transfers.sum())} transfers" in shown
    assert placement.layout.digest[:12] in shown
    worst = int(placement.balancedness.argmin())
    assert f"<td>{worst}</td><td>{placement.balancedness[worst]:.4f}</td>" in shown
    verdict = should_rebalance(live, LOAD, placement, dispatch="weighted")
    shown = verdict._repr_html_()
    assert escape(verdict.reason) in shown
    assert shown.count("<tr>") == 1 + live.num_layers
    report = gain_report(LOAD, TOPOLOGY)
    shown = report._repr_html_()
    assert words_html(report.conclusion) in shown
    assert shown.count("<td>*</td>") == 1


def test_a_placement_without_load_has_no_balance_to_show() -> None:
    shown = place(np.zeros((2, 4)), Topology(2), num_slots=4)._repr_html_()
    assert "balancedness" not in shown
