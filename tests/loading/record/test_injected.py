"""System calls of keeper and clients that fail, one by one and at random; `make inject` runs 100,000 schedules."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from eplb_core.files import reading
from eplb_core.loading.record import client as client_module
from eplb_core.loading.record import server as server_module
from eplb_core.loading.record.keeper import Keeper
from eplb_core.loading.record.record import LayoutRecord
from eplb_core.loading.record.state import Reply
from tests.loading.record.injected import STEP_WEIGHTS, Fault, NoExceptions, TruthError, World, schedule, take
from tests.loading.record.injector import ERRORS, Injector, choices

MOVE = [
    *[("start keeper", 0), ("start", 0), ("start", 0), ("follow", 1), ("begin", 0), ("write", 0), ("commit", 0)],
    *[("poll", 1), ("kill keeper", 0), ("start keeper", 0), ("leave", 0)],
]
"""Two engines map the weights, one follows, the other moves a layer; the keeper is killed and comes back."""


@pytest.fixture
def injector() -> Iterator[Injector]:
    """Installed; the library's log must tell of no exception."""
    made, log, handler = Injector(), logging.getLogger("eplb_core"), NoExceptions()
    log.addHandler(handler)
    with made.installed():
        yield made
    log.removeHandler(handler)
    assert handler.met == []


def move(folder: Path, injector: Injector, fault: Fault | None = None) -> tuple[World, list[tuple[str, str]]]:
    """All steps of a move, with one fault; the world, and who made which call."""
    for each in folder.iterdir():
        each.unlink()
    world, made = World(folder, injector), list[tuple[str, str]]()
    inner = injector.choose

    def choose(process: str, call: str) -> str | None:
        made.append((process.split()[0], call))
        return inner(process, call)

    injector.choose = choose
    world.arm(fault)
    for step, which in MOVE:
        take(world, step, which)
    world.finish()
    return world, made


def fail_each(folder: Path, injector: Injector, most: int) -> Counter[str]:
    """Each call of a move fails in each way; of many like it in one process the first `most`. How often, by call."""
    world, calls = move(folder, injector)
    assert (world.events["moves committed"], world.events["followers that went on"]) == (1, 1)
    seen: Counter[tuple[str, str]] = Counter()
    for index, each in enumerate(calls):
        seen[each] += 1
        if seen[each] <= most:
            for kind in range(len(choices(each[1]))):
                move(folder, injector, Fault(index, kind))
    return sum((Counter({hit.call: count}) for hit, count in injector.hits.items()), Counter())


@pytest.mark.slow
def test_each_call_of_a_move_may_fail_in_each_way(tmp_path: Path, injector: Injector) -> None:
    hits = fail_each(tmp_path, injector, 2)
    assert set(hits) >= set(ERRORS) - {"poll"}  # asked only after another error


@pytest.mark.long
def test_each_call_of_a_move_may_fail_in_each_way_each_time(tmp_path: Path, injector: Injector) -> None:
    assert fail_each(tmp_path, injector, 1000).total() > 1500


@pytest.mark.slow
def test_random_faults_never_make_a_living_engine_gone(tmp_path: Path, injector: Injector) -> None:
    events = sum((schedule(seed, tmp_path, injector).events for seed in range(150)), Counter[str]())
    assert events["moves committed"] > 10
    assert events["followers that went on"] > 0
    assert events["keepers killed"] > 50
    assert len({hit.call for hit in injector.hits}) > 15


class Machine(RuleBasedStateMachine):
    """Steps in any order, with any fault; Hypothesis makes a failure small."""

    folder: Path
    injector: Injector

    def __init__(self) -> None:
        super().__init__()
        for each in self.folder.iterdir():
            each.unlink()
        self.world = World(self.folder, self.injector)
        for step in ("start keeper", "start", "start"):
            take(self.world, step, 0)

    @rule(
        step=st.sampled_from(list(STEP_WEIGHTS)),
        number=st.integers(0, 100),
        fault=st.none() | st.builds(Fault, st.integers(0, 30), st.integers(0, 20)),
    )
    def take(self, step: str, number: int, fault: Fault | None) -> None:
        """One step; what it checks is the truth."""
        if fault is not None:
            self.world.arm(fault)
        take(self.world, step, number)

    def teardown(self) -> None:
        self.world.finish()


@pytest.mark.slow
def test_no_order_of_steps_and_faults_makes_a_living_engine_gone(tmp_path: Path, injector: Injector) -> None:
    kind: Any = type("InFolder", (Machine,), {"folder": tmp_path, "injector": injector})
    run_state_machine_as_test(
        kind,
        settings=settings(
            max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


# ---- the truth is noticed --------------------------------------------------------------------------------------------


def gone_by_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that takes an error of its own for the end of an engine."""
    monkeypatch.setattr(server_module, "has_ended", lambda sock: True)


def leaves_by_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that closes its connection when a call fails, and serves on."""
    monkeypatch.setattr(client_module, "has_ended", lambda sock: True)


def written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state file that can be read half-written."""

    def write(path: Any, content: bytes, **options: Any) -> None:
        with reading.open(path, "wb") as file:  # type: ignore[attr-defined]
            file.write(content)

    monkeypatch.setattr(reading, "write_atomic", write)


def promised_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that says `ok` and does not write."""
    monkeypatch.setattr(Keeper, "_promised", lambda self, record, reply, before: reply)


def cut_off_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that the keeper cannot hear any more counts as gone."""

    def lose(self: LayoutRecord, engine: str) -> Reply:
        return self.detach(engine)

    monkeypatch.setattr(LayoutRecord, "lose", lose)


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [gone_by_any_error, leaves_by_any_error, written_in_place, promised_before_it_is_written, cut_off_is_gone],
)
def test_a_keeper_or_engine_that_takes_errors_lightly_is_noticed(
    tmp_path: Path, injector: Injector, monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    broken(monkeypatch)

    def run() -> None:
        for seed in range(2000):
            schedule(seed, tmp_path, injector)

    with pytest.raises((TruthError, ValueError)) as caught:  # a file that cannot be read is a ValueError
        run()
    assert str(caught.value)


def test_a_schedule_is_the_same_every_time(tmp_path: Path, injector: Injector) -> None:
    first = schedule(7, tmp_path, injector).events
    assert schedule(7, tmp_path, injector).events == first
