"""Random schedules of engines, crashes and moves; `python -m benchmarks.schedules` runs 10,000 of them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.schedules import LyingWeightsError, World
from eplb_core.loading.record.record import LayoutRecord
from eplb_core.loading.record.state import Reply


class Clean(LayoutRecord):
    """Forgets a move that was pending when its engine died."""

    def detach(self, engine: str) -> Reply:
        reply = super().detach(engine)
        self._set(dirty="")
        return reply


class Crowded(LayoutRecord):
    """Lets an engine move under others."""

    def begin(self, engine: str, layers: Any, version: int) -> Reply:
        engines = self.state.engines
        self._set(engines=tuple(name for name in engines if name == engine))
        reply = super().begin(engine, layers, version)
        self._set(engines=engines)
        return reply


class Forgetful(LayoutRecord):
    """Does not count engines that cannot be seen to leave."""

    def _add_non_follower(self, name: str) -> None:
        pass


class Hasty(LayoutRecord):
    """Serves weights in the middle of a move."""

    def check_fetch(self, *claim: Any) -> Reply:
        reply = super().check_fetch(*claim)
        return reply._replace(status="ok") if reply.status == "busy" else reply


class Trusting(LayoutRecord):
    """Serves an engine that says nothing about its layout as if nothing had moved."""

    def check_fetch(self, engine: str | None = None, version: int | None = None, digest: str | None = None) -> Reply:
        return super().check_fetch(engine, version, digest or self.digest)


class Impatient(LayoutRecord):
    """Lets an engine move before those that follow have stopped."""

    def begin(self, engine: str, layers: Any, version: int) -> Reply:
        self._set(holding=self.state.followers)
        return super().begin(engine, layers, version)


class Stubborn(LayoutRecord):
    """Takes an answer to one move for an answer to the next."""

    def _end_move(self) -> None:
        self._set(pending=None, asking=False)


class Blind(LayoutRecord):
    """Takes an engine whose connection it ended for one that has gone."""

    def lose(self, engine: str) -> Reply:
        return self.detach(engine)


class Hopeful(LayoutRecord):
    """Takes a move that had begun for one that was only asked for."""

    def detach(self, engine: str) -> Reply:
        if self.state.pending is not None:
            self._set(asking=True)
        return super().detach(engine)


@pytest.mark.slow
def test_no_engine_ever_serves_a_layout_that_differs_from_the_weights() -> None:
    events = sum((World(seed).run() for seed in range(150)), start=World(0).events)
    assert events["moves"] > 300
    assert events["kills"] > 100
    assert events["engines that served"] > 200
    assert events["old engines that served"] > 5
    assert events["starts that failed"] > 20
    assert events["followers that switched"] > 10
    assert events["followers that stopped for good"] > 2
    assert events["connections that were cut"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("broken", [Clean, Crowded, Forgetful, Hasty, Trusting, Impatient, Stubborn, Blind, Hopeful])
def test_the_schedules_notice_a_record_that_breaks_a_rule(broken: type[LayoutRecord]) -> None:
    def run() -> None:
        for seed in range(300):
            World(seed, broken).run()

    with pytest.raises(LyingWeightsError, match="routes by"):
        run()


def test_a_schedule_is_the_same_every_time() -> None:
    assert World(7).run() == World(7).run()
