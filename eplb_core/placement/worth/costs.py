"""What a pass and a move cost: the numbers that turn loads into seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import combinations
from math import sqrt

import numpy as np

from eplb_core._arrays import ArrayLike, FloatArray, check_flag, check_int, check_real, to_reals
from eplb_core._text import quoted

# Columns whose singular values are further apart than this cannot be told apart.
_TELLS_APART = 1e-6


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds and bytes of passes and moves. Immutable; equal on all ranks, or their verdicts differ.

    A layer takes `layer_s` and the time of its slowest rank, `(token_s * tokens + expert_s * experts) / speed`. A move
    delays passes by `stall` times its transfers' time, and by `install_s` for each layer. The defaults know no cost:
    time is then counted in tokens, and moves are free.

    Raises:
        ValueError: A number is negative or NaN, or none of `token_s` and `expert_s` is above 0.
        TypeError: Not a number.

    Example:
        >>> model = CostModel(token_s=2e-7, expert_bytes=44e6, node_bandwidth=3e11, network_bandwidth=4e10)
        >>> model.link_s(same_node=False)
        0.0011
    """

    token_s: float = 1.0
    """Seconds that a rank of speed 1 needs for one token of one expert."""
    expert_s: float = 0.0
    """Seconds for each activated expert of a rank in a pass: reading its weights, which is what decoding waits for."""
    layer_s: float = 0.0
    """Seconds of a layer that no placement changes, in each pass."""
    expert_bytes: float = 0.0
    """Bytes of one expert on one layer: all tensors, scales too."""
    node_bandwidth: float = float("inf")
    """Bytes a second that a rank sends or receives within its node."""
    network_bandwidth: float = float("inf")
    """Bytes a second that a rank sends or receives between nodes, and for what no rank holds any more."""
    stall: float = 1.0
    """Seconds that passes lose for each second of transfers: 1 where they wait, near 0 beside the passes."""
    install_s: float = 0.0
    """Seconds that a pass waits for the install of one layer."""
    rebalance_s: float = 0.0
    """Seconds that passes lose for a rebalance of any size."""
    fit_error: float = 0.0
    """Of `fit`: root mean square of the seconds that it does not explain; says nothing else."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("bandwidth"):
                unlimited = isinstance(value, float) and value == float("inf")
                number = value if unlimited else check_real(value, field.name, above=0.0)
            else:
                number = check_real(value, field.name, at_least=0.0)
            object.__setattr__(self, field.name, float(number))
        if self.token_s == 0.0 and self.expert_s == 0.0:
            raise ValueError("`token_s` (=0.0) or `expert_s` (=0.0) must be above 0; else no placement changes a pass")

    def link_s(self, *, same_node: bool) -> float:
        """Seconds of one transfer between two ranks."""
        return self.expert_bytes / (
            self.node_bandwidth if check_flag(same_node, "same_node") else self.network_bandwidth
        )

    @classmethod
    def fit(
        cls,
        tokens: ArrayLike,
        seconds: ArrayLike,
        *,
        experts: ArrayLike | None = None,
        num_layers: int = 1,
        **known: float,
    ) -> CostModel:
        """Fit the model to measured passes by least squares, with no coefficient below 0.

        Measure passes of different sizes. For each, take the rank that the others waited for.

        Args:
            tokens: Tokens that this rank computed, `[n]`, added up over the layers measured.
            seconds: Time of these layers, `[n]`.
            experts: Experts that it activated, `[n]`, added up over the layers. Default: `expert_s` is 0.
            num_layers: Layers that each time is of.
            **known: The fields that are not fitted, as for the model.

        Returns:
            Model with `token_s`, `expert_s`, `layer_s` and `fit_error` set.

        Raises:
            ValueError: Fewer measurements than unknowns; sizes so alike that the unknowns cannot be told apart; or
                times that do not grow with size.
            TypeError: A field that is fitted is given, too.

        Cost:
            O(n). Fit once and give every rank the same model: the last digits depend on numpy's linear algebra.

        Example:
            >>> model = CostModel.fit([1000, 2000, 4000], [0.003, 0.005, 0.009], num_layers=2)
            >>> round(model.token_s, 9), round(model.layer_s, 9)
            (2e-06, 0.0005)
        """
        for name in ("token_s", "expert_s", "layer_s", "fit_error"):
            if name in known:
                raise TypeError(f"`{name}` (={known[name]}) must not be given to `fit`, which finds it")
        times = _column(seconds, "seconds")
        columns = {"token_s": _column(tokens, "tokens")}
        if experts is not None:
            columns["expert_s"] = _column(experts, "experts")
        for name, column in zip(("tokens", "experts"), columns.values(), strict=False):
            if len(column) != len(times):
                raise ValueError(f"`{name}` ({len(column)} values) must be as many as `seconds` ({len(times)})")
        columns["layer_s"] = np.full(len(times), float(check_int(num_layers, "num_layers", 1)))
        if len(times) < len(columns):
            raise ValueError(f"`seconds` ({len(times)} values) must be at least {len(columns)}, one for each unknown")
        found = _solve_not_negative(np.stack(list(columns.values()), axis=1), times)
        if found is None:
            raise ValueError(
                f"`seconds` ({len(times)} values) must tell {', '.join(columns)} apart; measure passes of other "
                "sizes, or leave `experts` out"
            )
        fitted = dict(zip(columns, found[0].tolist(), strict=True))
        if fitted["token_s"] == 0.0 and fitted.get("expert_s", 0.0) == 0.0:
            raise ValueError("`seconds` must grow with `tokens` or `experts`; measure the ranks that others wait for")
        return cls(**{**known, **fitted, "fit_error": found[1]})


def model_of(cost: CostModel | None) -> CostModel:
    """The model, or for None the one that knows no cost; TypeError for anything else."""
    if cost is not None and not isinstance(cost, CostModel):
        raise TypeError(f"`cost` (={quoted(cost)}) must be a CostModel or None")
    return CostModel() if cost is None else cost


def _column(values: ArrayLike, name: str) -> FloatArray:
    array = to_reals(values, name)
    if array.ndim != 1:
        raise ValueError(f"`{name}` (shape {list(array.shape)}) must be [n]")
    for value in array.tolist():
        check_real(value, name, at_least=0.0)
    return array


def _solve_not_negative(columns: FloatArray, target: FloatArray) -> tuple[FloatArray, float] | None:
    """Least squares with no weight below 0, and its root mean square; None where columns cannot be told apart.

    The best of all sets of columns whose own answer is not negative: three columns have seven.
    """
    count = columns.shape[1]
    scale = columns.max(axis=0, initial=1e-300)  # the rank is counted on columns of one size
    best, least = np.zeros(count), float(np.linalg.norm(target))
    rank = 0
    for chosen in (list(each) for size in range(1, count + 1) for each in combinations(range(count), size)):
        part, _, rank, _ = np.linalg.lstsq(columns[:, chosen] / scale[chosen], target, rcond=_TELLS_APART)
        weights = np.zeros(count)
        weights[chosen] = part / scale[chosen]
        error = float(np.linalg.norm(target - columns @ weights))
        if part.min() >= 0.0 and error < least:
            best, least = weights, error
    return (best, least / sqrt(len(target))) if rank == count else None  # the last set is the whole
