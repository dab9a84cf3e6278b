"""What mode "auto" remembers between an engine's calls, for every engine that asks for a layout again and again."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from eplb_core.adapters.filled import keep_filled
from eplb_core.balancer.balancer import OWN, Balancer
from eplb_core.layout import ExpertLayout


class Balancers:
    """One `Balancer` for each shape of model that the engine asks about; changes with each call of `layout_of`.

    Ranks must make the same calls with equal arguments. Where one may have missed a call, or has other answers, all of
    them `forget`.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[object, Balancer]] = {}

    def layout_of(
        self, load: npt.NDArray[Any], live: ExpertLayout, *, move_cost: float, **options: Any
    ) -> ExpertLayout:
        """What should be live after this window of load, `[L, E]`; a slot that `live` fills stays filled.

        Args:
            load: Tokens of each expert since the last call.
            live: The layout in place.
            move_cost: What a transfer costs, in windows of its layer's time.
            options: Of `place`; those that a Balancer decides are passed over.
        """
        made = {name: value for name, value in options.items() if name not in OWN and value is not None}
        made |= {"move_cost": move_cost, "num_slots": live.num_slots}
        made_for = (live.topology, sorted(made.items()))
        known, balancer = self._known.get(load.shape, (None, None))
        if balancer is None or known != made_for:
            balancer = Balancer(live.topology, **made)
            self._known[load.shape] = (made_for, balancer)
        balancer.observe(load)
        return keep_filled(balancer.propose(live).layout, live)

    def forget(self, shape: tuple[int, ...] | None = None) -> None:
        """Start anew, for one shape or for all: ranks that come have seen nothing, and all must answer alike."""
        if shape is None:
            self._known.clear()
        else:
            self._known.pop(shape, None)


def auto_line(move_cost: float, interval: str, unit: str = "steps") -> str:
    """Say in the log that mode "auto" is on, and which `interval` of the engine is worth setting."""
    return f"auto, move_cost={move_cost:g}, moves only what pays: {interval} may be short, 100 to 300 {unit}"
