"""Do the weights match the layout? Compares the prints of all ranks with each other and with what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from eplb_core._arrays import ArrayLike, BoolArray, IntArray, check_kind, read_only, to_numpy
from eplb_core.layout import ExpertLayout, layer_rows
from eplb_core.loading.pull_plan import check_loaded, check_slots_exist

UNKNOWN = np.iinfo(np.int64).min
"""In a reference: nothing is recorded for this expert."""

FaultKind = Literal["unloaded", "wrong_expert", "zeros", "unknown_bytes", "disagree", "same_bytes"]

_NONE, _ZEROS = -2, -1


class WeightFault(NamedTuple):
    """A slot that does not hold what the layout says."""

    layer: int
    """Row of the layout."""
    slot: int
    """Global slot; of a whole tensor, the row."""
    rank: int
    """Rank whose memory it is."""
    expert: int
    """Expert that it should hold."""
    kind: FaultKind
    """`unloaded`: the loader did not write it. `wrong_expert`: it holds `holds`. `zeros`: all its bytes are zero.
    `unknown_bytes`: what it holds is no expert of this layer. `disagree`: replicas differ, and neither a reference nor
    a majority says which is right. `same_bytes`: the expert `holds` has the same bytes in every tensor, and neither has
    a reference."""
    holds: int
    """Expert whose bytes it has; -1 = none that is known."""
    tensors: tuple[int, ...]
    """Columns of the prints that differ from what they should be."""

    def __str__(self) -> str:
        found = {
            "unloaded": "was not written by the loader",
            "wrong_expert": f"holds expert {self.holds}",
            "zeros": "holds zeros",
            "unknown_bytes": "holds the bytes of no expert of this layer",
            "disagree": "differs from the other replicas, and nothing says which is right",
            "same_bytes": f"holds the same bytes as expert {self.holds}, and nothing says whose they are",
        }[self.kind]
        where = f", tensors {', '.join(map(str, self.tensors))}" if self.tensors else ""
        return (
            f"layer {self.layer}, slot {self.slot} (rank {self.rank}) must hold expert {self.expert} and {found}{where}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class WeightReport:
    """What `verify_weights` found."""

    faults: tuple[WeightFault, ...]
    """In order of layer, rank and slot; empty = the weights match the layout as far as was checked."""
    by_expert: IntArray
    """The next reference, int64 `[L, E, tensors]`, read-only: the one given, and what replicas now agree on."""
    num_checked: int
    """Slots that were compared with a reference or with another replica."""
    num_unchecked: int
    """Slots with nothing to compare with: the only replica of an expert without a reference. Recorded on trust."""

    @property
    def ok(self) -> bool:
        """Nothing wrong was found."""
        return not self.faults

    def __str__(self) -> str:
        more = f"\n... {len(self.faults) - 8} more" if len(self.faults) > 8 else ""
        head = f"{self.num_checked} slots checked, {self.num_unchecked} on trust, {len(self.faults)} faults"
        return "\n".join([head, *map(str, self.faults[:8])]) + more


def verify_weights(
    prints_of_all_ranks: ArrayLike | Sequence[Any],
    layout: ExpertLayout,
    *,
    layers: ArrayLike | None = None,
    reference: ArrayLike | None = None,
    loaded: ArrayLike | None = None,
) -> WeightReport:
    """Compare what all slots hold with what the layout says they hold.

    A slot is compared with the reference of its expert. Where there is none, replicas are compared with each other: a
    strict majority is right, and without one all replicas are faults. So no slot is ever its own reference. What the
    loader did not write is `unloaded`: no other slot is compared with it, and it adds nothing to the reference.
    Nor does an expert that is all zero or has the bytes of another expert of its layer: without a reference both are
    faults. Whole tensors may hold such values: of them nothing of the kind is asked.

    Args:
        prints_of_all_ranks: `fingerprints` of ranks 0..R-1 in order, `[R, n, S, T]` as a list, an array or a tensor, or
            `[n, P, T]`; or those of the whole tensors, `[R, n, P, T]`. In a list, a rank with fewer slots than S gives
            prints of its own; the layout must leave the others empty.
        layout: The layout at the moment of the prints.
        layers: Rows that were printed, as given to `fingerprints`; default all.
        reference: `by_expert` of an earlier report on the same weights and sample, `[L, E, T]`.
        loaded: Bools `[L, P]`: slots that the loaders report as written; default all. Not for whole tensors.

    Returns:
        Report: faults that name layer, slot, what it should hold and what it holds; the next reference.

    Raises:
        ValueError: Shapes that do not belong to the layout.
        TypeError: Prints that are not int64.

    Cost:
        O(n * P * T) on the host, some milliseconds at 58 x 288 x 6; waits for prints that are still on a device.

    Threads:
        Any; pure.

    Example:
        >>> from eplb_core import ExpertLayout, Topology
        >>> layout = ExpertLayout([[0, 1, 2, 0]], num_experts=3, topology=Topology(num_ranks=2))
        >>> at_load = [[[11], [12]]], [[[13], [11]]]  # rank, layer, slot, tensor
        >>> reference = verify_weights(at_load, layout).by_expert
        >>> now = [[[11], [13]]], [[[13], [11]]]
        >>> print(verify_weights(now, layout, reference=reference).faults[0])
        layer 0, slot 1 (rank 0) must hold expert 1 and holds expert 2, tensors 0
    """
    check_kind(layout, "layout", ExpertLayout)
    rows = np.arange(layout.num_layers) if layers is None else layer_rows(layers, layout.num_layers)
    prints, expert, rank, slot = _by_place(prints_of_all_ranks, layout, rows)
    tensors = prints.shape[2]
    by_expert = np.full((layout.num_layers, layout.num_experts, tensors), UNKNOWN, dtype=np.int64)
    if reference is not None:
        by_expert[:] = check_reference(reference, by_expert.shape)
    written = check_loaded(loaded, layout)[rows]
    if expert.shape[1] != layout.num_slots:
        if loaded is not None:
            raise ValueError("`loaded` must be None with prints of whole tensors; it describes slots")
        written = np.ones(expert.shape, dtype=np.bool_)
    faults: list[WeightFault] = []
    checked = unchecked = 0
    for index, layer in enumerate(rows.tolist()):
        places = _Layer(layer, prints[index], expert[index], rank, slot, written[index])
        is_given = (by_expert[layer] != UNKNOWN).all(axis=1)
        alone = places.record(by_expert[layer])
        doubt = np.full(layout.num_experts, _NONE)
        if expert.shape[1] == layout.num_slots:
            doubt = _doubt(by_expert[layer], is_given)
        faults += places.faults(by_expert[layer], doubt, is_given)
        by_expert[layer][doubt != _NONE] = UNKNOWN
        unchecked += alone
        checked += int((written[index] & (expert[index] >= 0)).sum()) - alone
    return WeightReport(tuple(faults), read_only(by_expert), checked, unchecked)


class _Layer(NamedTuple):
    """One layer's places: slots of all ranks, or rows of whole tensors on all ranks."""

    layer: int
    prints: IntArray
    """`[Q, T]`."""
    expert: IntArray
    """`[Q]`; -1 = empty, whatever it holds is right."""
    rank: IntArray
    slot: IntArray
    written: BoolArray

    def record(self, reference: IntArray) -> int:
        """Fill in experts that the reference lacks from replicas that agree; says how many slots stand alone."""
        new = np.flatnonzero(self.written & (self.expert >= 0))
        new = new[(reference[self.expert[new]] == UNKNOWN).any(axis=1)]
        new = new[np.argsort(self.expert[new], kind="stable")]
        experts, first, count = np.unique(self.expert[new], return_index=True, return_counts=True)
        reference[experts] = self.prints[new[first]]
        differs = (self.prints[new] != reference[self.expert[new]]).any(axis=1)
        for expert in np.unique(self.expert[new[differs]]).tolist():  # few, or none
            group = new[self.expert[new] == expert]
            values, votes = np.unique(self.prints[group], axis=0, return_counts=True)
            winner = int(np.argmax(votes))
            reference[expert] = values[winner] if 2 * votes[winner] > len(group) else UNKNOWN
        return int((count == 1).sum())

    def faults(self, reference: IntArray, doubt: IntArray, is_given: BoolArray) -> list[WeightFault]:
        """Places that differ from the reference or are in doubt, which is as `_doubt` has it."""
        held = self.expert >= 0
        wrong = self.prints != reference[np.maximum(self.expert, 0)]
        bad = held & (~self.written | wrong.any(axis=1) | (doubt[self.expert] != _NONE))
        return [
            self._in_doubt(place, doubt, is_given)
            if self.written[place] and not wrong[place].any()
            else self._fault(place, wrong[place], reference)
            for place in np.flatnonzero(bad).tolist()
        ]

    def _in_doubt(self, place: int, doubt: IntArray, is_given: BoolArray) -> WeightFault:
        """A place that holds what its expert was recorded with."""
        expert = int(self.expert[place])
        holds = int(doubt[expert])
        kind: FaultKind = "zeros" if holds == _ZEROS else "wrong_expert" if is_given[holds] else "same_bytes"
        every = tuple(range(self.prints.shape[1]))
        return WeightFault(self.layer, int(self.slot[place]), int(self.rank[place]), expert, kind, holds, every)

    def _fault(self, place: int, wrong: BoolArray, reference: IntArray) -> WeightFault:
        expert = int(self.expert[place])
        held = self.prints[place, wrong]
        same = (reference[:, wrong] == held).all(axis=1)  # an expert that has these bytes in the tensors that are wrong
        holds = int(np.argmax(same)) if same.any() else -1
        tensors = tuple(np.flatnonzero(wrong).tolist())
        kind: FaultKind = "wrong_expert" if holds >= 0 else "unknown_bytes" if held.any() else "zeros"
        if not self.written[place]:
            kind, holds, tensors = "unloaded", -1, ()
        elif (reference[expert] == UNKNOWN).any():
            kind, holds, tensors = "disagree", -1, ()
        return WeightFault(self.layer, int(self.slot[place]), int(self.rank[place]), expert, kind, holds, tensors)


def _doubt(reference: IntArray, is_given: BoolArray) -> IntArray:
    """Say of each expert that was just recorded whether it is all zero, or which expert has the same bytes, `[E]`."""
    doubt = np.full(len(reference), _NONE)
    known = np.flatnonzero((reference != UNKNOWN).all(axis=1))
    rows, group, count = np.unique(reference[known], axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)  # numpy 2.0 gives it another shape
    zero: BoolArray = (rows == 0).all(axis=1)
    for place in np.flatnonzero((zero[group] | (count[group] > 1)) & ~is_given[known]).tolist():  # few, or none
        others = known[group == group[place]]
        other = others[others != known[place]]
        doubt[known[place]] = _ZEROS if zero[group[place]] else int(other[0])
    return doubt


def _by_place(
    prints_of_all_ranks: ArrayLike | Sequence[Any], layout: ExpertLayout, rows: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Prints `[n, Q, T]`, experts `[n, Q]`, ranks `[Q]` and slots `[Q]` of all places, ranks in order."""
    value = prints_of_all_ranks
    name = "prints_of_all_ranks"
    if isinstance(value, list | tuple):
        value = _padded([to_numpy(each, name) for each in value], layout)
    array = to_numpy(value, name)
    ranks, per_rank, slots = layout.topology.num_ranks, layout.slots_per_rank, layout.num_slots
    if array.ndim and not array.shape[-1]:
        raise ValueError(f"`prints_of_all_ranks` (shape {list(array.shape)}) must have a tensor or more")
    if array.dtype != np.int64:
        raise TypeError(f"`prints_of_all_ranks` (dtype {array.dtype}) must be int64, as `fingerprints` gives them")
    expert = layout.physical_to_logical_map[rows]
    place = np.arange(slots, dtype=np.int64)
    if array.ndim == 3 and array.shape[:2] == (len(rows), slots):
        return array, expert, place // per_rank, place
    if array.ndim == 4 and array.shape[:2] == (ranks, len(rows)) and array.shape[2] in (per_rank, slots):
        flat = np.moveaxis(array, 0, 1).reshape(len(rows), -1, array.shape[3])
        if array.shape[2] == per_rank:
            return flat, expert, place // per_rank, place
        return flat, np.tile(expert, (1, ranks)), np.repeat(np.arange(ranks), slots), np.tile(place, ranks)
    raise ValueError(
        f"`prints_of_all_ranks` (shape {list(array.shape)}) must be [{ranks}, {len(rows)}, {per_rank}, tensors] or "
        f"[{len(rows)}, {slots}, tensors]; gather the prints of every rank, for the same `layers`"
    )


def _padded(arrays: list[Any], layout: ExpertLayout) -> list[Any]:
    """Prints of ranks, with zeros for slots that a rank does not have and that the layout leaves empty."""
    if len(arrays) != layout.topology.num_ranks or any(each.ndim != 3 for each in arrays):
        return arrays
    size = layout.slots_per_rank
    if max(each.shape[1] for each in arrays) > size:  # of whole tensors
        return arrays
    for rank, each in enumerate(arrays):
        check_slots_exist(layout, rank, each.shape[1])
    return [np.pad(each, ((0, 0), (0, size - each.shape[1]), (0, 0))) for each in arrays]


def check_reference(value: object, shape: tuple[int, ...]) -> IntArray:
    """`by_expert` of a report, int64 `[L, E, tensors]`, or ValueError."""
    array = to_numpy(value, "reference")
    if array.dtype != np.int64 or array.shape != shape:
        raise ValueError(
            f"`reference` ({array.dtype} {list(array.shape)}) must be int64 {list(shape)}; "
            "pass the `by_expert` of a report"
        )
    return array
