"""Random schedules of engines, crashes, moves and restarts: does an engine ever serve another layout than the weights?

A world has two ranks, each with a keeper's record and the weights of its slots. Engines start, agree, map the weights,
move experts slot by slot, commit, or follow the one that moves, and die between any two steps; a keeper sees a death
some steps later, on each rank at another time, ends the connection of an engine that lives on, and may itself be
restarted with its memory kept. After every step each engine that serves must route by what the slots hold.

python -m benchmarks.schedules --json schedules.json
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

import eplb_core as eplb
from benchmarks import measure
from eplb_core.loading.record.agree import Finding, decide
from eplb_core.loading.record.follow import Look, settle
from eplb_core.loading.record.record import LayoutRecord
from eplb_core.loading.record.state import RecordState, Reply

RANKS, LAYERS, SLOTS, EXPERTS = 2, 2, 4, 3
STEPS = 200
TOPOLOGY = eplb.Topology(num_ranks=RANKS)
EVENTS = [("engine", 80.0), ("see", 20.0), ("start", 2.0), ("kill", 1.0), ("cut", 0.1), ("restart", 0.1), ("anew", 2.0)]
INITIAL = eplb.ExpertLayout.trivial(LAYERS, EXPERTS, num_slots=SLOTS, topology=TOPOLOGY)
SHAPE = (LAYERS, SLOTS, EXPERTS, RANKS)


class LyingWeightsError(Exception):
    """An engine serves a layout that the weights are not in."""


class World:
    """Keepers, weights and engines, moved on by one random step after another."""

    def __init__(self, seed: int, record: type[LayoutRecord] = LayoutRecord) -> None:
        self.random = random.Random(seed)
        self.kind = record
        self.records = [record(INITIAL) for _ in range(RANKS)]
        self.weights = INITIAL.physical_to_logical_map.copy()
        self.engines: list[Engine] = []
        self.unseen: list[tuple[LayoutRecord, str]] = []
        self.history: list[list[RecordState]] = [[] for _ in range(RANKS)]
        """All states of each rank's record, as news of them go to followers."""
        self.events: Counter[str] = Counter()

    def run(self, steps: int = STEPS) -> Counter[str]:
        """All steps, and what happened in them."""
        for _ in range(steps):
            self.step()
            for record, states in zip(self.records, self.history, strict=True):
                if not states or states[-1] is not record.state:
                    states.append(record.state)
            for engine in self.engines:
                if engine.serves is not None and not np.array_equal(engine.serves, self.weights):
                    raise LyingWeightsError(
                        f"{engine.name} routes by {engine.serves.tolist()}, {self.weights.tolist()}"
                    )
        return self.events

    def step(self) -> None:
        """One event; mostly one engine takes one step."""
        (event,) = self.random.choices(*zip(*EVENTS, strict=True))
        if event == "see" and self.unseen:
            record, name = self.unseen.pop(self.random.randrange(len(self.unseen)))
            record.detach(name)
        elif event == "start" and len(self.engines) < 3:
            kind = self.random.choices(["mover", "follower", "old"], [55, 40, 5])[0]
            self.engines.append(Engine(self, f"e{self.events['starts']}", kind))
            self.events["starts"] += 1
        elif event == "kill" and self.engines:
            self.leave(self.random.choice(self.engines))
            self.events["kills"] += 1
        elif event == "cut" and self.engines:
            engine = self.random.choice(self.engines)
            for rank in self.random.choice([[0], [1], [0, 1]]):
                if rank < len(engine.keepers):
                    engine.keepers[rank].lose(engine.name)
                    engine.keepers[rank] = LayoutRecord(INITIAL)
                    self.events["connections that were cut"] += 1
        elif event == "restart":
            rank = self.random.randrange(RANKS)
            self.records[rank] = self.kind.restarted(self.records[rank].state)
            self.events["keeper restarts"] += 1
        elif event == "anew" and not self.engines:
            self.records = [self.kind(INITIAL) for _ in range(RANKS)]
            self.weights = INITIAL.physical_to_logical_map.copy()
            self.events["weights loaded anew"] += 1
        elif self.engines:
            engine = self.random.choice(self.engines)
            if next(engine.steps, None) is None:
                self.leave(engine)

    def leave(self, engine: Engine) -> None:
        """However it went: each keeper sees it later."""
        self.engines.remove(engine)
        self.unseen += [(record, engine.name) for record in engine.keepers]
        self.random.shuffle(self.unseen)


class Engine:
    """One engine of all ranks; `steps` yields wherever it may be interrupted."""

    def __init__(self, world: World, name: str, kind: str) -> None:
        self.world, self.name = world, name
        self.keepers: list[LayoutRecord] = []
        self.serves: np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None = None
        self.layout, self.version = INITIAL, 0
        self.heard: list[int] = []
        """How far into each rank's history a follower has heard."""
        self.steps = self.live_without_a_record() if kind == "old" else self.live(kind)

    def live(self, kind: str) -> Iterator[bool]:
        """From the first connection on; ends where it does not start."""
        yield from self.start()
        if self.serves is not None:
            yield from self.follow() if kind == "follower" else self.move()

    def start(self) -> Iterator[bool]:
        """Attach, agree, map; `serves` is None where it does not start."""
        world = self.world
        for record in list(world.records):
            record.attach(self.name)
            self.keepers.append(record)
            yield True
        while True:
            found = []
            for rank in range(RANKS):
                found.append(self.look(rank))
                yield True
            decision = decide(found, deadline=1.0)
            if decision.action != "wait":
                break
        if decision.action == "fail":
            world.events["starts that failed"] += 1
            return
        layout, version = self.keepers[0].layout, decision.version
        for rank in range(RANKS):
            reply = Reply("busy")
            while reply.status == "busy":
                if any(self.ask(each) is not self.keepers[each] for each in range(RANKS)):
                    return  # a keeper has gone: it loads from disk
                reply = self.keepers[rank].check_fetch(self.name, version, layout.digest)
                yield True
            if reply.status == "refused":
                return
        self.layout, self.version, self.serves = layout, version, layout.physical_to_logical_map
        world.events["engines that served"] += 1

    def move(self) -> Iterator[bool]:
        """Serve, and move layers whenever the keepers let it."""
        world, layout, version = self.world, self.layout, self.version
        while True:
            yield True
            target = self.other_layout(layout)
            layers = [int(layer) for layer in np.flatnonzero(world_bits(world.random))]
            replies = [Reply("busy")] * RANKS
            for _ in range(world.random.randint(1, 20)):  # ranks ask side by side; followers need time to stop
                for rank in range(RANKS):
                    if replies[rank].status == "busy":
                        replies[rank] = self.ask(rank).begin(self.name, layers, version)
                        yield True
                if not any(reply.status == "busy" and self.asks(rank) for rank, reply in enumerate(replies)):
                    break
            if any(reply.status != "ok" for reply in replies):
                for rank, reply in enumerate(replies):
                    if reply.status == "ok" or self.asks(rank):
                        self.keepers[rank].abort(self.name, layers)
                        yield True
                continue
            world.events["moves under followers"] += any(record.state.holding for record in self.keepers)
            self.serves = None  # between two passes
            for layer in layers:
                for slot in range(SLOTS):
                    world.weights[layer, slot] = target.physical_to_logical_map[layer, slot]
                    yield True
            layout = layout.replace(target, layers)
            self.serves = layout.physical_to_logical_map
            rows = layout.physical_to_logical_map[layers]
            done: list[Reply] = []
            for rank in range(RANKS):
                done.append(self.ask(rank).commit(self.name, layers, rows))
                yield True
            world.events["moves"] += 1
            if any(reply.status != "ok" or reply.digest != layout.digest for reply in done):
                while True:  # serves on, and never moves again
                    yield True
            version += 1

    def asks(self, rank: int) -> bool:
        """The keeper waits for followers, on behalf of this engine."""
        state = self.ask(rank).state
        return state.asking and state.pending is not None and state.pending.engine == self.name

    def follow(self) -> Iterator[bool]:
        """Serve, stop when all ranks are asked to, go on when all ranks see the end of it."""
        world = self.world
        self.heard = [len(states) - 1 for states in world.history]
        followed = []
        for rank in range(RANKS):
            followed.append(self.ask(rank).follow(self.name, self.layout.digest).status == "ok")
            yield True
        while not all(followed):  # it serves on, and moves pause
            yield True
        while True:
            for rank in range(RANKS):
                yield self.hear(rank)
            if not all(self.name in self.seen(rank).awaited for rank in range(RANKS)):
                continue
            self.serves = None
            while self.serves is None:
                for rank in range(RANKS):
                    state = self.seen(rank)
                    if self.name in state.awaited and state.version == self.version:
                        self.ask(rank).hold(self.name, self.version, state.begun)
                        yield True
                looks = [self.look_on(rank) for rank in range(RANKS)]
                settled = settle(looks, self.version, self.layout.digest)
                if settled.action == "fail":
                    world.events["followers that stopped for good"] += 1
                    return
                if settled.action != "wait":
                    world.events["followers that switched"] += settled.action == "switch"
                    self.layout, self.version = self.seen(0).layout, self.seen(0).version
                    self.serves = self.layout.physical_to_logical_map
                else:
                    for rank in range(RANKS):
                        yield self.hear(rank)

    def hear(self, rank: int) -> bool:
        """News of a rank's record come late, some are left out, and a keeper that has gone sends none."""
        if self.ask(rank) is self.keepers[rank]:
            self.heard[rank] = self.world.random.randint(self.heard[rank], len(self.world.history[rank]) - 1)
        return True

    def seen(self, rank: int) -> RecordState:
        """What a follower knows of a rank's record."""
        return self.world.history[rank][self.heard[rank]]

    def look_on(self, rank: int) -> Look:
        """What a rank that has stopped tells the others."""
        state = self.seen(rank)
        lost = "lost" if self.world.records[rank] is not self.keepers[rank] else ""
        moving = state.pending is not None and state.version == self.version
        return Look(state.version, state.digest, moving, state.dirty or lost)

    def live_without_a_record(self) -> Iterator[bool]:
        """An engine of a time before records: it does not attach and says no digest."""
        for record in list(self.world.records):
            if record.check_fetch(self.name).status != "ok":
                return
            yield True
        self.serves = INITIAL.physical_to_logical_map
        self.world.events["old engines that served"] += 1
        while True:
            yield True

    def look(self, rank: int) -> Finding:
        """What this rank tells the others at start-up."""
        finding = Finding(INITIAL.digest, SHAPE)
        if self.ask(rank) is not self.keepers[rank]:
            return finding._replace(failure="lost")
        state = self.keepers[rank].state
        if state.dirty:
            return finding._replace(record=True, failure=state.dirty)
        pending = str(state.pending or "")
        return finding._replace(
            record=True, version=state.version, digest=state.digest, record_shape=SHAPE, pending=pending
        )

    def ask(self, rank: int) -> LayoutRecord:
        """The keeper that this engine is connected to, or one that knows nobody if it has restarted."""
        if self.world.records[rank] is self.keepers[rank]:
            return self.keepers[rank]
        return LayoutRecord(INITIAL)

    def other_layout(self, layout: eplb.ExpertLayout) -> eplb.ExpertLayout:
        """The same replicas elsewhere."""
        rows = layout.physical_to_logical_map.copy()
        for row in rows:
            self.world.random.shuffle(row)
        return eplb.ExpertLayout(rows, EXPERTS, topology=TOPOLOGY)


def world_bits(random_numbers: random.Random) -> list[int]:
    """One layer or both."""
    return random_numbers.choice([[1, 0], [0, 1], [1, 1]])


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("schedules", __doc__, quick="200 schedules instead of 10,000")
    options = parser.parse_args(argv)
    count = 200 if options.quick else 10_000
    start = time.perf_counter()
    events: Counter[str] = Counter()
    for seed in range(count):
        events += World(seed).run()
    took = time.perf_counter() - start
    lines = [
        f"{count:,} schedules of {STEPS} steps, {took:.0f} s: no engine served a layout that differed from the weights",
        ", ".join(f"{number:,} {what}" for what, number in sorted(events.items())),
    ]
    print("\n".join(lines))
    measure.write_json(options.json, {"summary": lines, "schedules": count, "steps": STEPS, "events": events})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
