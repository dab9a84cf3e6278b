"""Replays, layouts and plans as HTML; the page is opened in a real browser where there is one."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from html import escape, unescape
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
    cost_preset,
    gain_report,
    place,
    plan_pull,
    should_rebalance,
    simulate,
)
from eplb_core._arrays import FloatArray
from eplb_core._html import line_svg, words_html
from eplb_core.simulation import Comparison
from eplb_core.simulation.html import _maps, report_html, write_report
from eplb_core.simulation.result import averaged

TOPOLOGY = Topology(4, 2)
LOAD = np.random.default_rng(0).integers(1, 90, (9, 3, 8))
# Windows 20 to 28 of a longer recording.
TRACE = Trace(LOAD, tuple(map(str, range(20, 29))), (3, 4, 5), 2)
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    options: dict[str, Any] = {"topology": TOPOLOGY, "num_slots": 12, "interval": 3, "bound": True, "keep_ranks": True}
    return compare_policies(TRACE, ["none", "place"], **options)


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


def maps_of(maps: Any, windows: int) -> list[FloatArray]:
    """Maps as the page draws them, `[rows, columns]`; NaN where nothing is known."""
    columns = -(-windows // maps["step"])
    found = []
    for text in maps["cells"]:
        cells = np.frombuffer(base64.b64decode(text), np.uint8).reshape(-1, columns).astype(np.float64)
        found.append(np.where(cells == 255, np.nan, maps["top"] * (cells / 254) ** 2))
    return found


def facts_of(page: str) -> dict[str, str]:
    rows = re.findall('<tr><th scope="row">(.*?)</th><td>(.*?)</td></tr>', page)
    return {unescape(name): unescape(text) for name, text in rows}


def test_the_page_holds_the_numbers_of_the_replays(comparison: Comparison) -> None:
    page = report_html(comparison, trace=TRACE)
    data = data_of(page)
    assert [policy["name"] for policy in data["policies"]] == ["none", "place"]
    assert (data["step"], data["unscored"], data["best"], data["windows"], data["first"]) == (1, 3, 1, 9, 20)
    assert data["bound"] == pytest.approx(comparison["place"].bound.tolist(), rel=1e-3)
    together, ranks = maps_of(data["together"], 9), maps_of(data["ranks"], 9)
    for number, (shown, sim) in enumerate(zip(data["policies"], comparison, strict=True)):
        assert shown["curve"] == pytest.approx(sim.window_balancedness.tolist(), rel=1e-3)
        assert shown["moves"] == sim.rebalance_windows[sim.transfers.sum(axis=1) > 0].tolist()
        assert (shown["ranks"], shown["rankStep"], shown["nodes"]) == (4, 1, [2])
        share = sim.rank_load / sim.rank_load.mean(axis=1, keepdims=True)
        np.testing.assert_allclose(together[number].T, share, atol=data["together"]["top"] * 0.004)
        assert sim.layer_rank_load is not None
        for at, row in enumerate(shown["layers"]):
            load = sim.layer_rank_load[:, at]
            share = load / load.mean(axis=1, keepdims=True)
            np.testing.assert_allclose(ranks[3 * number + at].T, share, atol=data["ranks"]["top"] * 0.004)
            assert row["layer"] == TRACE.layer_ids[at]
            assert row["balancedness"] == pytest.approx(sim.balancedness[3:, at].mean(), rel=1e-3)
            assert row["worst"] == pytest.approx(sim.balancedness[3:, at].min(), rel=1e-3)
            assert row["time"] == pytest.approx(sim.step_s[3:, at].mean(), rel=1e-3)
            assert row["transfers"] == sim.transfers[:, at].sum()
            assert row["network"] == sim.link_transfers[:, at, 2].sum()
        assert f"<tr><td>{sim.policy}</td><td>{sim.total_balancedness:.3f}</td>" in page
    for at, (shown, ids) in enumerate(zip(maps_of(data["experts"], 9), data["experts"]["ids"], strict=True)):
        assert ids == sorted(range(8), key=lambda expert: (-LOAD[:, at, expert].sum(), expert))
        share = LOAD[:, at] / LOAD[:, at].mean(axis=1, keepdims=True)
        np.testing.assert_allclose(shown.T, share[:, ids], atol=data["experts"]["top"] * 0.004)


def test_the_page_says_what_it_is_about(comparison: Comparison) -> None:
    page = report_html(comparison, trace=TRACE, about={"model": "Mixtral", "ordered by": "J. & Sons"})
    facts, best = facts_of(page), comparison["place"]
    assert facts["model"] == "Mixtral"
    assert facts["ordered by"] == "J. & Sons"
    assert facts["experts"] == "3 layers of 8 experts, 2 for each token"
    assert facts["windows"] == "9, numbered 20 to 28"
    assert facts["ranks"].startswith("4 on 2 nodes (2 on each)")
    assert facts["slots"].startswith("12 on each layer, 3 slots on a rank; 4 ")
    assert {best.digests[0][:12], best.digests[-1][:12]} <= set(re.findall("[0-9a-f]{12}", facts["layout"]))
    assert facts["hardware"] == "not given"
    said = page[page.index('<p id="decision">') :].partition("</div>")[0]
    words = unescape(re.sub("<[^>]*>", " ", said)).split()
    assert words == comparison.conclusion.replace("`", " ").split()
    assert "windows 23-28" in comparison.conclusion  # as the recording numbers them
    assert "20-22" in str(comparison)


def test_dates_speeds_and_hardware_are_said_where_they_are_known() -> None:
    days = tuple(f"2026-05-{day:02d}" for day in range(1, 10))
    trace = Trace(LOAD, days, path="folder/load.csv", source="a table", notes=("a table: columns were guessed",))
    topology = Topology(rank_to_node=[0, 0, 0, 1], rank_speed=[1, 1, 0.5, 1])
    start = ExpertLayout.trivial(3, 8, topology=topology, num_slots=10)
    start = ExpertLayout(start.physical_to_logical_map[:, ::-1], 8, topology=topology)
    sim = simulate(trace, topology=topology, num_slots=10, current=start, interval=3, cost=cost_preset("H200"))
    facts = facts_of(report_html([sim], trace=trace))
    assert facts["recorded"] == "2026-05-01 to 2026-05-09"
    assert facts["recording"] == "load.csv; a table: columns were guessed"  # once
    assert facts["ranks"] == "4 on 2 nodes (1 to 3 on each), of speeds 0.5 to 1"
    assert "up to 3 slots" in facts["slots"]
    assert facts["hardware"] == "H200 SXM"
    assert sim.cost is not None
    assert facts["assumed"].startswith(f"{sim.cost.assumed}; 1 pass in a window")
    assert facts["assumed"].endswith("the experts and their all-to-all are left out")
    assert "in order" not in facts["layout"]
    assert data_of(report_html([sim], trace=trace))["names"] == list(days)
    stream = report_html([sim], trace=Trace(LOAD[:1], path="day.npy", format="stream"))  # whose first window is known
    assert [data_of(stream)[name] for name in ("experts", "ranks", "names")] == [None, None, []]
    assert facts_of(stream)["recording"] == "day.npy"
    with pytest.raises(ValueError, match="must be what was replayed"):
        report_html([sim], trace=Trace(LOAD[:1]))
    with pytest.raises(ValueError, match="one replay or more"):
        report_html([])
    with pytest.raises(TypeError, match="trace"):
        report_html([sim], trace=LOAD)  # type: ignore[arg-type]
    other = simulate(trace, topology=Topology(2), num_slots=8, policy="none", interval=3, cost=sim.cost)
    assert "below" in facts_of(report_html([sim, other]))
    assert "below" not in facts


def odd_page() -> str:
    """A page with names that would like to be code, a window and a layer without load, and ranks of other speeds."""
    load = LOAD.copy()
    load[4] = load[:, 1] = 0
    trace = Trace(load, ("a" * 60, *[EVIL] * 8), (3, 4, 5), source=f"<i>{EVIL}", path=EVIL, holds="load")
    topology = Topology(rank_to_node=[0, 0, 0, 1, 1], rank_speed=[1, 1, 0.5, 1, 1])
    policies: Any = {"a very long name of a policy " * 4: "none", EVIL: "place"}
    sims = compare_policies(trace, policies, topology=topology, num_slots=10, interval=3, keep_ranks=True)
    return report_html(sims, trace=trace, title=EVIL, about={EVIL: EVIL})


def test_the_page_loads_nothing_and_keeps_foreign_text_text(comparison: Comparison, tmp_path: Path) -> None:
    plain, odd = report_html(comparison), odd_page()
    assert [tag for tag, _ in Tags(plain).found if tag not in ("tr", "td", "th", "code")] == [
        tag for tag, _ in Tags(odd).found if tag not in ("tr", "td", "th", "code")
    ]
    for page in (plain, odd):
        tags = Tags(page).found
        assert [tag for tag, _ in tags].count("script") == 2
        assert not [
            name for _, attributes in tags for name in attributes if name in ("src", "href") or name[:2] == "on"
        ]
        assert "@import" not in page
        assert "url(" not in page
        assert re.findall(r"https?://[^\s\"']+", page) == ["http://www.w3.org/2000/svg"] * page.count("http")
    assert data_of(odd)["policies"][1]["name"] == EVIL
    assert facts_of(odd)[EVIL] == EVIL
    assert "<h1>@DATA@ @TITLE@ @</h1>" in report_html(comparison, title="@DATA@ @TITLE@ @")
    write_report(comparison, tmp_path / "page.html", trace=TRACE, about={"date": "\ud800"})
    assert (tmp_path / "page.html").read_bytes() == report_html(
        comparison, trace=TRACE, about={"date": "\ud800"}
    ).encode()


def test_windows_without_load_are_gaps() -> None:
    load = LOAD.copy()
    load[4] = load[:, 2] = 0
    sims = compare_policies(load, "none", topology=TOPOLOGY, num_slots=12, interval=3, keep_ranks=True)
    data = data_of(report_html(sims, trace=Trace(load)))
    assert data["bound"] is None
    assert data["policies"][0]["curve"][4] is None
    for maps in (data["together"], data["ranks"], data["experts"]):
        shown = maps_of(maps, 9)
        assert np.isnan(shown[0][:, 4]).all()
        assert not np.isnan(shown[0][:, 3]).any()
    assert np.isnan(maps_of(data["ranks"], 9)[2]).all()
    assert data["policies"][0]["layers"][2]["worst"] is None


def test_what_a_screen_cannot_show_is_averaged() -> None:
    values = np.array([1.0, 3.0, np.nan, 5.0, np.nan])
    assert averaged(values, 2).tolist()[:2] == [2.0, 5.0]
    assert np.isnan(averaged(values, 2)[2])
    load = np.tile(LOAD, (100, 1, 1))
    data = data_of(report_html(compare_policies(load, "none", topology=TOPOLOGY, num_slots=12, interval=450)))
    assert (data["step"], len(data["policies"][0]["curve"])) == (3, 300)
    assert maps_of(data["together"], 900)[0].shape == (4, 300)


def test_maps_of_large_models_stay_small() -> None:
    """58 layers on 64 ranks with 3 policies, 600 windows."""
    layer = np.random.default_rng(0).random((600, 64))
    maps = _maps([layer] * 58 * 3)
    assert maps is not None
    assert sum(map(len, maps["cells"])) < 300_000
    shown = maps_of(maps, 600)[5]
    np.testing.assert_allclose(shown.T, averaged(layer, maps["step"]), atol=maps["top"] * 0.004)
    assert _maps([layer] * 4000) is None
    assert _maps([]) is None


# ---- a real browser --------------------------------------------------------------------------------------------------

NOTED = """<head>
<script>
var errors = [];
addEventListener("error", event => errors.push(String(event.message)));
console.error = console.warn = (...words) => errors.push(words.join(" "));
alert = () => errors.push("alert");
</script>
"""
# On each page: reads values, sorts, zooms by a pointer and by numbers, takes another layer and policy; notes what came.
ACTIONS = """
<script>
addEventListener("load", () => {
  const look = frame => {
    const page = frame.contentDocument, view = frame.contentWindow, by = id => page.getElementById(id), seen = {};
    const texts = at => [...page.querySelectorAll(at)].map(each => each.textContent);
    const cells = row => [...row.cells].map(cell => cell.textContent);
    const rows = () => [...page.querySelectorAll("#layers tr")].map(cells);
    const send = (target, kind, x, y, pointerType = "mouse") => {
      const box = target.getBoundingClientRect();
      const where = {clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true, pointerType};
      target.dispatchEvent(new view.PointerEvent(kind, where));
      return by("tip").textContent;
    };
    const change = (id, value) => { by(id).value = value; by(id).dispatchEvent(new view.Event("change")); };
    const overlaps = () => ["x", "y", "scale"].flatMap(kind => ["curves", "ranks", "experts"].map(id => {
      const boxes = [...page.querySelectorAll("#" + id + " ." + kind)].map(each => each.getBoundingClientRect());
      return boxes.filter((a, at) => boxes.slice(at + 1).some(b =>
        a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)).length;
    })).reduce((a, b) => a + b, 0);
    seen.ready = page.body.dataset.ready;
    seen.wide = [view.innerWidth, page.documentElement.scrollWidth - page.documentElement.clientWidth];
    seen.outside = [...page.querySelectorAll("svg.chart text")].filter(each => {
      const box = each.getBoundingClientRect();
      return box.left < 0 || box.right > view.innerWidth;
    }).length;
    seen.overlaps = overlaps();
    seen.height = page.querySelector("#ranks .x").getBoundingClientRect().height;
    seen.titles = [by("ranks-title").textContent, by("experts-title").textContent];
    seen.rows = rows();
    page.querySelector("th[data-key=balancedness]").click(); seen.ascending = rows();
    page.querySelector("th[data-key=balancedness]").click(); seen.descending = rows();
    seen.curve = send(by("curves"), "pointermove", 0.55, 0.4);
    seen.heat = send(by("ranks"), "pointermove", 0.95, 0.4);
    const box = by("tip").getBoundingClientRect();
    seen.tipInside = box.left >= 0 && box.right <= view.innerWidth && box.width > 0;
    seen.expert = send(by("experts"), "pointermove", 0.95, 0.4);
    send(by("ranks"), "pointerdown", 0.4, 0.5, "touch");
    send(by("ranks"), "pointerup", 0.6, 0.5, "touch");
    send(by("ranks"), "pointerleave", 0.6, 0.5, "touch");
    seen.touched = [by("from").value, by("tip").textContent];
    send(by("policy"), "pointerdown", 0.5, 0.5, "touch");
    seen.touchedElsewhere = by("tip").textContent;
    send(by("ranks"), "pointerdown", 0.4, 0.5);
    send(by("ranks"), "pointermove", 0.6, 0.5);
    send(by("ranks"), "pointerup", 0.6, 0.5);
    seen.drawn = [by("from").value, by("to").value];
    seen.drawnTicks = texts("#curves .x");
    by("all").click(); seen.all = [by("from").value, by("to").value];
    change("from", 22); change("to", 24); seen.ticks = texts("#experts .x"); by("all").click();
    change("layer", -1); seen.together = [by("ranks-title").textContent, by("experts-part").hidden];
    change("layer", 2); seen.layer = by("experts-title").textContent;
    change("policy", 0); seen.other = rows(); seen.otherTitle = by("layers-title").textContent;
    seen.paths = page.querySelectorAll("#curves path").length;
    view.dispatchEvent(new view.Event("beforeprint"));
    seen.printed = by("curves").getAttribute("viewBox").split(" ")[2];
    seen.errors = view.errors;
    return seen;
  };
  const seen = [...document.querySelectorAll("iframe")].map(look);
  document.body.textContent = "SEEN" + JSON.stringify(seen) + "NEES";
});
</script>
"""


def browser() -> str:
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
    for name in names:
        path = shutil.which(name) if name else None
        if path:
            return path
    pytest.skip("needs chromium (Debian's package), or its path in CHROMIUM")


def shown_by_browser(pages: list[tuple[str, int]], folder: Path) -> list[Any]:
    """What `ACTIONS` saw on each page, in a frame of that width."""
    frames = [
        f'<iframe style="width:{width}px;height:900px" srcdoc="{escape(html.replace("<head>", NOTED, 1))}"></iframe>'
        for html, width in pages
    ]
    page = folder / "page.html"
    page.write_text("<!doctype html><style>iframe { border: 0 }</style><body>" + "".join(frames) + ACTIONS + "</body>")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [browser(), *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode and not done.stdout:
        pytest.skip(f"chromium does not start here: {done.stderr[-200:]}")
    found = re.search("SEEN(.*)NEES", done.stdout, re.S)
    assert found, done.stdout[-2000:]
    return list(json.loads(unescape(found[1])))


WIDTHS = (360, 800, 1400)


@pytest.fixture(scope="module")
def seen(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """All pages in one browser: it takes longer to start than to show them."""
    load = np.array([[[2000, 2000, 1000, 1000]]] * 6)  # the fuller rank has 4,000 tokens
    options: dict[str, Any] = {"topology": Topology(2), "num_slots": 4, "interval": 3}
    small = [
        report_html(compare_policies(load, "none", cost=cost, **options)) for cost in (None, CostModel(token_s=3e-8))
    ]
    page, odd = report_html(comparison, trace=TRACE), odd_page()
    pages = [(each, width) for each in (page, odd) for width in WIDTHS] + [(each, 800) for each in small]
    return shown_by_browser(pages, tmp_path_factory.mktemp("browser"))


@pytest.mark.slow
@pytest.mark.parametrize("at", range(6))
def test_the_page_fits_any_width_and_has_no_errors(seen: list[Any], at: int) -> None:
    found = seen[at]
    assert found["ready"] == "yes"
    assert found["errors"] == []
    assert found["wide"] == [WIDTHS[at % 3], 0]
    assert (found["overlaps"], found["outside"]) == (0, 0)
    assert found["height"] > 10  # letters that can be read on a phone
    assert found["tipInside"]
    assert found["printed"] == "680"


@pytest.mark.slow
@pytest.mark.parametrize("at", range(3))
def test_the_page_works_in_a_browser(comparison: Comparison, seen: list[Any], at: int) -> None:
    found, sim = seen[at], comparison["place"]
    numbers = [[float(cell) for cell in row] for row in found["rows"][1:]]
    for layer, row in enumerate(numbers):
        assert row == pytest.approx(
            [
                TRACE.layer_ids[layer],
                sim.balancedness[3:, layer].mean(),
                sim.balancedness[3:, layer].min(),
                sim.step_s[3:, layer].mean(),
                sim.transfers[:, layer].sum(),
                sim.link_transfers[:, layer, 2].sum(),
            ],
            rel=1e-3,
        )
    ascending = [float(row[1]) for row in found["ascending"][1:]]
    assert ascending == sorted(ascending) == [float(row[1]) for row in reversed(found["descending"][1:])]
    first, *values = found["curve"].splitlines()
    window = int(first.split()[1]) - 20
    assert [line.split()[0] for line in values] == ["none", "place", "bound"]
    assert [float(line.split()[1]) for line in values] == pytest.approx(
        [comparison["none"].window_balancedness[window], sim.window_balancedness[window], sim.bound[window]], rel=1e-3
    )
    least = int(sim.balancedness[3:].mean(axis=0).argmin())
    assert found["titles"][0].startswith(f"Load of the ranks with place, layer {TRACE.layer_ids[least]} ")
    window, rank, value = (re.findall(r"[\d.]+", line)[0] for line in found["heat"].splitlines())
    assert sim.layer_rank_load is not None
    load = sim.layer_rank_load[int(window) - 20, least]
    assert float(value) == pytest.approx(load[int(rank)] / load.mean(), rel=0.06)
    window, expert, value = (re.findall(r"[\d.]+", line)[0] for line in found["expert"].splitlines())
    tokens = LOAD[int(window) - 20, least]
    assert float(value) == pytest.approx(tokens[int(expert)] / tokens.mean(), rel=0.06, abs=0.01)
    assert found["all"] == ["20", "28"]
    assert found["touched"][0] == "20"  # a finger reads values, and they stay until it taps elsewhere
    assert re.match(r"window 2[23]\nrank 1\n", found["touched"][1])
    assert found["touchedElsewhere"] == ""
    low, high = map(int, found["drawn"])
    assert 20 < low <= high < 28
    assert {low, high} <= set(map(int, found["drawnTicks"])) <= set(range(low, high + 1))
    assert found["ticks"] == ["22", "23", "24"]
    assert found["together"] == ["Load of the ranks with place, all layers together", True]
    assert found["layer"].startswith(f"Load of the experts as recorded, layer {TRACE.layer_ids[2]}")
    assert found["other"][1:] != found["descending"][1:]
    assert found["otherTitle"] == "Layers with none"
    assert found["paths"] == 3


@pytest.mark.slow
def test_the_page_shows_large_and_small_numbers_as_they_are(seen: list[Any]) -> None:
    for found, unit, time in ((seen[6], "tokens of the fullest rank", "4000"), (seen[7], "ms per pass", "0.12")):
        assert found["rows"][0][3] == unit
        assert found["rows"][1] == ["0", "0.75", "0.75", time, "0", "0"]


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
