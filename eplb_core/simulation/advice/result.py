"""What `advise` found: candidates with their figures, the Pareto front, one recommendation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from eplb_core._html import PAGE, Point, points_svg, table_html, words_html
from eplb_core._text import number
from eplb_core.frames import Table
from eplb_core.placement.worth.decision import pays, windows_words
from eplb_core.simulation.advice.model import ModelExperts
from eplb_core.simulation.hardware import StepCost


class Judged(NamedTuple):
    """What a replay reaches and moves on a stretch of windows. Seconds are of a pass."""

    pass_s: float
    """Seconds of all layers, with the pauses of moves spread over the passes."""
    pause_s: float
    """Seconds of them that are pauses."""
    balancedness: float
    """Sum of means over sum of maxima of the ranks' loads; NaN without load."""
    moves: int
    """Times that experts moved."""
    node_transfers: int
    """Experts received from another rank of the node."""
    network_transfers: int
    """Experts received from another node."""
    wire_bytes: float
    """Bytes of all experts received."""

    @property
    def transfers(self) -> int:
        """Experts received."""
        return self.node_transfers + self.network_transfers


@dataclass(frozen=True, slots=True)
class Candidate:
    """One number of ranks and slots under one policy. Bytes are of a rank. Immutable."""

    policy: str
    """Name of the policy."""
    num_ranks: int
    """EP ranks."""
    num_nodes: int
    """Nodes, as large as the hardware makes them."""
    slots_per_rank: int
    """Slots of a rank and layer."""
    redundant_per_rank: int
    """Those beyond the fewest that hold all experts."""
    num_slots: int
    """Slots of all ranks on a layer."""
    weights_bytes: float
    """Experts of all layers, the model's where the trace has fewer."""
    redundant_bytes: float
    """Those of the redundant slots."""
    buffer_bytes: float
    """Buffers of the all-to-all."""
    buffer_growth_bytes: float
    """What the redundant slots of all ranks add to them."""
    fits: bool
    """Whether experts and buffers fit in the share of memory that is theirs."""
    chosen_on: Judged
    """On the windows by which candidates were chosen: no figure to quote."""
    judged: Judged
    """On the windows after those, which no layout and no choice has seen before."""
    saved: float = 0.0
    """Share of a judged pass that is saved beside the same ranks without redundant slots, in the trivial layout."""
    saved_by_moves: float = 0.0
    """The same beside the same slots in the trivial layout: what `simulate` compares with."""
    on_front: bool = False
    """Whether no other that fits is as good in judged pass, GPU-seconds and bytes of a rank, and better in one."""

    @property
    def gpu_s(self) -> float:
        """GPU-seconds of a judged pass: ranks times the pass."""
        return self.num_ranks * self.judged.pass_s

    @property
    def memory_bytes(self) -> float:
        """Experts and buffers."""
        return self.weights_bytes + self.buffer_bytes


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Advice(Table):
    """What `advise` found; `print` it. A data frame of it has a row for each candidate, with judged figures."""

    trace: str
    """File of the recording, or empty."""
    model: ModelExperts
    """The experts."""
    cost: StepCost
    """Seconds and bytes."""
    window_passes: float
    """Passes of a window."""
    windows: tuple[int, int, int]
    """The first window to choose on, the first that judges, and how many there are."""
    first_window: int
    """What the recording numbers the first of them."""
    num_layers: int
    """Layers of the trace."""
    pairs_a_window: float
    """Tokens of all experts on a layer of a judged window, in the mean."""
    pass_limit_s: float
    """The longest pass that may be chosen; infinite if none was named."""
    memory_share: float
    """Part of a GPU's memory that experts and buffers may take."""
    buffer_tokens: int
    """Tokens of a rank and pass that the buffers have room for at every slot."""
    candidates: tuple[Candidate, ...]
    """All that were replayed, by ranks, slots and policy."""
    chosen: int
    """The candidate that the windows to choose on speak for."""
    conclusion: str = ""
    """The answer in words."""

    @property
    def chosen_on(self) -> str:
        """The windows to choose on, in words, numbered as the recording does."""
        first, half, _ = (self.first_window + each for each in self.windows)
        return windows_words(first, half)

    @property
    def judged_on(self) -> str:
        """The windows that judge, in words."""
        _, half, end = (self.first_window + each for each in self.windows)
        return windows_words(half, end)

    @property
    def now(self) -> Candidate:
        """What the chosen one is compared with: its ranks without redundant slots, in the trivial layout."""
        ranks = self.candidates[self.chosen].num_ranks
        return next(
            each
            for each in self.candidates
            if each.num_ranks == ranks and each.redundant_per_rank == 0 and each.policy == "none"
        )

    @property
    def pays(self) -> bool:
        """Whether the chosen one saves 2% or more of a judged pass."""
        return pays(self.candidates[self.chosen].saved)

    @property
    def recommended(self) -> Candidate:
        """The chosen one where it pays, else what there is now."""
        return self.candidates[self.chosen] if self.pays else self.now

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The Pareto front of judged pass, GPU-seconds and bytes of a rank."""
        return tuple(each for each in self.candidates if each.on_front)

    def _columns(self) -> dict[str, Any]:
        rows = []
        for each in self.candidates:
            row = _facts(each)
            del row["chosen_on"]  # no figures to quote
            rows.append({**row, **row.pop("judged")})
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        first, half, end = (self.first_window + each for each in self.windows)
        return {
            "trace": self.trace,
            "num_layers": self.num_layers,
            "model": asdict(self.model),
            "assumed": self.cost.assumed,
            "window_passes": self.window_passes,
            "windows_chosen_on": [first, half],
            "windows_judged": [half, end],
            "pass_limit_s": self.pass_limit_s,
            "memory_share": self.memory_share,
            "buffer_tokens": self.buffer_tokens,
            "pays": self.pays,
            "recommended": _facts(self.recommended),
            "now": _facts(self.now),
            "candidates": [_facts(each) for each in self.candidates],
            "conclusion": self.conclusion,
        }

    def __str__(self) -> str:
        head, *rows = self._rows()
        widths = (2, 6, 13, 9, 10, 8, 6, 7, 9, 10)
        text = ["".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
        return "\n".join(
            [
                f"trace   {self.trace or 'in memory'}",
                f"model   {self.model.text}",
                "",
                *(line.rstrip() for line in text),
                *("", "> recommended; + on the Pareto front of pass, GPU-seconds and memory a rank."),
                _filled(
                    f"Figures are of {self.judged_on}, pauses counted; saved = beside the same ranks without "
                    "redundant slots, in the trivial layout; MB moved = a window."
                ),
                *("\n" + _filled(part) for part in self.conclusion.split("\n")),
            ]
        )

    def __repr__(self) -> str:
        best = self.recommended
        return f"Advice(ranks={best.num_ranks}, slots_per_rank={best.slots_per_rank}, policy={best.policy!r})"

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        first, *others = (f"<p>{words_html(part)}</p>" for part in self.conclusion.split("\n"))
        legend = "<p>A ring: recommended. Black: on the Pareto front; grey: not; pale: not within the limits.</p>"
        about = words_html(f"{self.trace or 'a load in memory'}; {self.model.text}; figures are of {self.judged_on}")
        parts = (f"<p>{about}</p>", f"<b>{first}</b>", self._picture(), legend, table_html(head, rows), *others)
        return f"<div>{''.join(parts)}</div>"

    def to_html(self) -> str:
        """A page of its own: the recommendation, all candidates in a picture, the table, the reasons."""
        return PAGE.format(title="Ranks, slots and a policy for a recorded load", body=self._repr_html_())

    def _picture(self) -> str:
        """Each candidate by its pass and its GPU-seconds; a pointer that rests on one reads its figures."""
        points = [
            Point(
                each.judged.pass_s * 1e3,
                each.gpu_s * 1e3,
                f"{each.num_ranks} ranks of {each.slots_per_rank} slots, {each.policy}: "
                f"{each.judged.pass_s * 1e3:.4g} ms a pass, {each.gpu_s * 1e3:.4g} GPU-ms, "
                f"{each.memory_bytes / 1e9:.3g} GB a rank",
                "#111" if each.on_front else "#999" if each.fits else "#ddd",
                each is self.recommended,
            )
            for each in sorted(self.candidates, key=lambda one: one.on_front)
        ]
        return points_svg(points, "ms a pass", "GPU-ms: ranks x pass")

    def _rows(self) -> list[Sequence[str]]:
        """The head, the front, and all policies on the ranks and slots of the chosen and of today's."""
        best, chosen, now = self.recommended, self.candidates[self.chosen], self.now
        windows = self.windows[2] - self.windows[1]
        rows: list[Sequence[str]] = [
            ("", "ranks", "slots a rank", "policy", "ms a pass", "GPU-ms", "bal.", "saved", "MB moved", "GB a rank")
        ]
        for each in self.candidates:
            frame = (each.num_ranks, each.num_slots)
            if each.on_front or each is now or frame == (chosen.num_ranks, chosen.num_slots):
                rows.append(
                    (
                        (">" if each is best else "") + ("+" if each.on_front else ""),
                        str(each.num_ranks),
                        str(each.slots_per_rank),
                        each.policy,
                        f"{each.judged.pass_s * 1e3:.4g}",
                        f"{each.gpu_s * 1e3:.4g}",
                        number(each.judged.balancedness),
                        f"{each.saved:.1%}",
                        f"{each.judged.wire_bytes / windows / 1e6:,.0f}",
                        f"{each.memory_bytes / 1e9:.3g}",
                    )
                )
        return rows


def _filled(text: str) -> str:
    """A paragraph of lines of 80 characters, options whole."""
    return textwrap.fill(text, 80, break_on_hyphens=False)


def _facts(each: Candidate) -> dict[str, Any]:
    facts = asdict(each)
    for name in ("chosen_on", "judged"):
        part: Judged = getattr(each, name)
        facts[name] = {**part._asdict(), "transfers": part.transfers}
    return {**facts, "gpu_s": each.gpu_s, "memory_bytes": each.memory_bytes}
