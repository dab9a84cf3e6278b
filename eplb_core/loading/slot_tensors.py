"""Say which tensors of a module are indexed by slot: what is certain is found, what is not is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import numpy as np
import torch

from eplb_core._arrays import IntArray, check_int, check_kind, check_names
from eplb_core.loading.modules import Held, held_tensors

_NOT_SLOTS = re.compile(r"score|correction|router|routing|gating|logical|(^|[._])gate([.]|$)")
"""In names of what belongs to logical experts, or to tokens, whatever its length."""


class SlotTensors(NamedTuple):
    """What a module keeps by slot."""

    tensors: dict[str, torch.Tensor]
    """By dotted name, `[S, ...]`."""
    whole: dict[str, torch.Tensor]
    """By dotted name, `[P, ...]`."""


class Candidate(NamedTuple):
    """A tensor of the module, and what its length says of it."""

    held: Held
    kind: Literal["slot", "whole", ""]
    """What its first dimension fits; nothing: neither."""
    is_named: bool
    """Whether the caller says what it is."""
    place: Place

    def __str__(self) -> str:
        return f"{self.held.name!r} (shape {list(self.held.tensor.shape)})"


class Place(NamedTuple):
    """Where a tensor's rows are."""

    start: int
    rows: int
    stride: int
    """Bytes from row to row."""
    extent: int
    """Bytes from a row's first to its last."""
    size: int
    """Bytes of a row's elements: equal to `extent` if it is one span."""

    @property
    def starts(self) -> IntArray:
        """First byte of each row, `[rows]`."""
        return self.start + self.stride * np.arange(self.rows, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What counts as indexed by slot; fields as the arguments of `ExpertStore.of_module`."""

    slots: int
    num_slots: int | None
    shared: int
    by_slot: tuple[str, ...]
    whole: tuple[str, ...]
    ignore: tuple[str, ...]

    @classmethod
    def of(
        cls,
        slots_per_rank: int,
        num_slots: int | None,
        num_shared: int,
        by_slot: Iterable[str],
        whole: Iterable[str],
        ignore: Iterable[str],
    ) -> Wanted:
        """Check the arguments."""
        named = check_names(by_slot, "by_slot"), check_names(whole, "whole"), check_names(ignore, "ignore")
        if named[1] and num_slots is None:
            raise ValueError("`whole` needs `num_slots`: how many rows such tensors have")
        return cls(
            check_int(slots_per_rank, "slots_per_rank", 1),
            None if num_slots is None else check_int(num_slots, "num_slots", 1),
            check_int(num_shared, "num_shared", 0),
            *named,
        )

    @property
    def whole_lengths(self) -> tuple[int, ...]:
        """Rows that a whole tensor may have: shared experts come once, once per rank or not at all."""
        if self.num_slots is None:
            return ()
        ranks, rest = divmod(self.num_slots, self.slots)
        once = self.num_slots, self.num_slots + self.shared
        return once if rest else (*once, ranks * (self.slots + self.shared))  # a rank with fewer slots than others

    def rows_of(self, candidate: Candidate) -> int:
        """Rows that count, without those of shared experts."""
        if not candidate.kind or self.num_slots is None:
            return self.slots if candidate.kind else candidate.place.rows
        return self.slots if candidate.kind == "slot" else self.num_slots

    def candidate(self, held: Held) -> Candidate | None:
        """Look at one tensor; None if it can be nothing of the kind: a setting, a place holder, another array."""
        tensor = held.tensor
        count = int(np.prod(tensor.shape, dtype=np.int64))
        if not tensor.ndim or not count or (count == 1 and self.slots > 1):
            return None
        is_slot, is_whole = (matches(held.name, patterns) for patterns in (self.by_slot, self.whole))
        if is_slot and is_whole:
            raise ValueError(f"`by_slot` and `whole` both name {held.name!r}; it is one or the other")
        kind: Literal["slot", "whole", ""] = ""
        if tensor.shape[0] == self.slots + self.shared and not is_whole:
            kind = "slot"
        elif tensor.shape[0] in self.whole_lengths and not is_slot:
            kind = "whole"
        if isinstance(tensor, np.ndarray):
            if not kind:
                return None
            size, strides, start = tensor.itemsize, tensor.strides, tensor.__array_interface__["data"][0]
        elif hasattr(type(tensor), "__tensor_flatten__"):
            return None  # its parts are tensors of their own, and were reached
        elif tensor.layout != torch.strided:
            raise ValueError(
                f"tensor {held.name!r} is {tensor.layout}; its rows are no spans of bytes: name it in `ignore`"
            )
        else:
            size, start = tensor.element_size(), tensor.data_ptr()
            strides = tuple(stride * size for stride in tensor.stride())
        inner = sum((length - 1) * stride for length, stride in zip(tensor.shape[1:], strides[1:], strict=True))
        place = Place(start, tensor.shape[0], strides[0], inner + size, count // tensor.shape[0] * size)
        return Candidate(held, kind, is_slot or is_whole, place)

    def refusal(self, doubtful: Sequence[Candidate]) -> ValueError:
        """Say of the first why it is in doubt, and what settles it."""
        first, shape = doubtful[0], list(doubtful[0].held.tensor.shape)
        option = "whole" if first.kind == "whole" else "by_slot"
        settle = f"name it in `{option}` if each row is a slot's, else in `ignore`"
        if isinstance(first.held.tensor, np.ndarray):
            why = "is a numpy array with a row for each slot, which nothing moves"
            settle = "make it a tensor, or name it in `ignore` if it is not indexed by slot"
        elif not first.kind:
            rows = f" or {self.num_slots} rows" if self.num_slots else ""
            why = f"must have {self.slots + self.shared} slots{rows} as its first dimension"
            if self.slots in shape[1:]:
                why += f", not as dimension {1 + shape[1:].index(self.slots)}"
            settle = "name what is not indexed by slot in `ignore`; where each slot has tensors of its own, give "
            settle += "`ExpertStore` lists of S of them"
        elif first.held.foreign:
            why = "is in a set, or in a module that this one has not registered"
        else:
            every = " of all ranks" if first.kind == "whole" else ""
            why = f"has as many rows as there are slots{every}, and so may what is not indexed by slot, such as a bias "
            why += "of the router"
        more = f" ({len(doubtful) - 1} more)" if len(doubtful) > 1 else ""
        return ValueError(f"tensor {first} {why}{more}; {settle}")


def find_slot_tensors(module: torch.nn.Module, wanted: Wanted) -> SlotTensors:
    """Say which tensors of a module are indexed by slot; errors as `ExpertStore.of_module`."""
    certain, doubtful = sort_tensors(module, wanted, Memory())
    if doubtful:
        raise wanted.refusal(doubtful)
    found = SlotTensors({}, {})
    for held, kind, *_ in certain:
        tensor = torch.as_tensor(held.tensor).detach()
        if kind == "slot":
            found.tensors[held.name] = tensor[: wanted.slots]
        else:
            found.whole[held.name] = tensor[: wanted.num_slots]
    return found


def sort_tensors(module: torch.nn.Module, wanted: Wanted, memory: Memory) -> tuple[list[Candidate], list[Candidate]]:
    """Those that are indexed by slot for certain, and those in doubt; neither has what lies in `memory`.

    Certain is what the caller names; what has three dimensions or more, the first of a fitting length; and what has one
    or two of them and a name that begins with that of one with three: `w13_bias` beside `w13_weight`. A length alone is
    no proof: a router's bias has one number per expert. What lies in rows of tensors that are certain is a view of
    them, moves with them, and is left out.

    Args:
        module: One layer's experts.
        wanted: What to look for.
        memory: Rows that are known; those of tensors that are certain are added.
    """
    check_kind(module, "module", torch.nn.Module)
    reached = held_tensors(module, lambda name: matches(name, wanted.ignore))
    candidates = [each for each in map(wanted.candidate, reached) if each is not None]
    stems = {_stem(each.held.name) for each in candidates if _is_certain(each)}
    likely = [each for each in candidates if _is_certain(each) or _belongs(each, stems)]
    certain: set[str] = set()
    # The largest first, so that a view never stands for what it is a view of.
    for each in sorted(likely, key=lambda each: (each.place.extent != each.place.size, -each.place.size)):
        if not memory.has(each.place, wanted.rows_of(each)):
            memory.add(each.place.starts, each.place.extent)
            certain.add(each.held.name)
    left = [each for each in candidates if each.held.name not in certain]
    doubtful = [each for each in left if not memory.has(each.place, wanted.rows_of(each))]
    return [each for each in candidates if each.held.name in certain], doubtful


def _is_certain(candidate: Candidate) -> bool:
    held = candidate.held
    if isinstance(held.tensor, np.ndarray) or not candidate.kind:
        return False
    return candidate.is_named or (held.tensor.ndim >= 3 and not held.foreign and not _NOT_SLOTS.search(held.name))


def _belongs(candidate: Candidate, stems: Iterable[str]) -> bool:
    name = candidate.held.name
    if candidate.held.foreign or isinstance(candidate.held.tensor, np.ndarray) or _NOT_SLOTS.search(name):
        return False
    return bool(candidate.kind) and any(name.startswith(f"{stem}_") for stem in stems)


def _stem(name: str) -> str:
    return re.sub(r"_q?weight(_packed)?$", "", name)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of these, or fits a pattern among them."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Memory:
    """Rows of bytes that are known to move with their slots."""

    def __init__(self) -> None:
        self._rows: list[tuple[IntArray, int]] = []

    def add(self, starts: IntArray, extent: int) -> None:
        """Add rows of one length; address 0 is nowhere."""
        if starts[0]:
            self._rows.append((starts, extent))

    def has(self, place: Place, rows: int) -> bool:
        """Whether each of the first `rows` rows lies in that same row of one tensor, or all in rows without a gap."""
        starts, extent = place.starts[:rows], place.extent
        for known, size in self._rows:
            if len(known) >= len(starts):
                same = known[: len(starts)]
                if bool(((same <= starts) & (starts + extent <= same + size)).all()):
                    return True
        return any(low <= starts[0] and starts[-1] + extent <= high for low, high in self._spans())

    def _spans(self) -> Iterator[tuple[int, int]]:
        """First and last byte of rows that follow each other without a gap."""
        every = sorted((start, start + size) for starts, size in self._rows for start in starts.tolist())
        low = high = 0
        for start, end in every:
            if start > high:
                if high:
                    yield low, high
                low = start
            high = max(high, end)
        if high:
            yield low, high
