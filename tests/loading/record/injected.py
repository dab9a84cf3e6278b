"""A keeper and its engines under injected faults, in one thread; after each step the truth is compared with the record.

Engines attach, map the weights, follow, move layers slot by slot, leave and die; the keeper dies, stops and comes back.
Each step may have one system call fail, or a whole process be out of descriptors or of disk.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from eplb_core import ExpertLayout, LayoutClient, LayoutRecord, LayoutServer, Topology
from eplb_core.errors import EplbError
from eplb_core.loading.record.file import load_record, open_record
from eplb_core.loading.record.state import RecordState
from tests.loading.record.injector import DESCRIPTORS, DISK, ERRORS, Injector, Killed, choices

T = TypeVar("T")

LAYERS = 2
LAYOUT = ExpertLayout([[0, 1, 2, 3, 3, 0], [0, 1, 2, 3, 1, 2]], 4, topology=Topology(num_ranks=2))
ROWS = ([3, 2, 1, 0, 0, 3], [0, 1, 2, 3, 3, 0], [1, 0, 3, 2, 2, 1])
STEPS = 30
MEMORY = os.memfd_create("weights")
MOST = 3
"""Engines at a time."""


class TruthError(AssertionError):
    """The record says of living engines, or of the weights, what is not so."""


class Fault(NamedTuple):
    """The `call`-th call from now on fails, in the `kind`-th way that it can."""

    call: int
    kind: int


class Engine:
    """A process that uses the weights."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.client: LayoutClient | None = None
        self.routes: np.ndarray[Any, np.dtype[np.int64]] | None = None
        """By what it routes, from the moment in which it has mapped the weights."""
        self.version = 0
        self.follows = self.stopped = self.ended = False
        self.asks = False
        """In a call: it does nothing else meanwhile."""
        self.moves: int | None = None
        """Layer that it may write."""
        self.wrote = self.off = False


class World:
    """All processes; methods are steps."""

    def __init__(self, folder: Path, injector: Injector) -> None:
        self.injector, self.path, self.file = injector, str(folder / "s"), folder / "record"
        self.weights = LAYOUT.physical_to_logical_map.copy()
        self.engines: list[Engine] = []
        self.server: LayoutServer | None = None
        self.keeper, self.memory = "keeper 0", "m"
        self.stopped = False
        """The keeper, by a signal."""
        self.armed: Fault | None = None
        self.lacks: dict[str, tuple[str, ...]] = {}
        """By process, or kind of process: errors of all calls that can have one of them."""
        self.events: Counter[str] = Counter()
        self.descriptors = len(os.listdir("/proc/self/fd"))
        injector.dead.clear()
        injector.choose, injector.before_reading, injector.waits = self._choose, self.pump, self._wait
        self._pumping = False
        self._read: tuple[Any, Any] = (None, None)

    # ---- faults --------------------------------------------------------------------------------------------------

    def _choose(self, process: str, call: str) -> str | None:
        short_of = self.lacks.get("keeper" if process == self.keeper else "engines", ())
        for each in short_of:
            if each in ERRORS[call]:
                return each
        if self.armed is not None:
            if self.armed.call == 0:
                ways, kind = choices(call), self.armed.kind
                self.armed = None
                return ways[kind % len(ways)]
            self.armed = self.armed._replace(call=self.armed.call - 1)
        return None

    def arm(self, fault: Fault | None) -> None:
        """Of the steps to come; one at a time."""
        self.armed = fault

    def lack(self, who: str, what: str) -> None:
        """Out of descriptors, out of disk, or of nothing."""
        self.lacks[who] = {"descriptors": DESCRIPTORS[:1], "disk": DISK[:1]}.get(what, ())

    # ---- the keeper ----------------------------------------------------------------------------------------------

    def start_keeper(self) -> None:
        """With the memory kept: a clean record is of the layout that the weights are in."""
        if self.server is not None:
            return
        self.keeper = f"keeper {int(self.keeper.split()[1]) + 1}"
        self.events["keepers started"] += 1
        with self.injector.under(self.keeper):
            try:
                record = open_record(self.file, LAYOUT, memory=self.memory)
                self._check_opened(record)
                about: Any = {"exports": Weights(), "state_file": self.file, "memory": self.memory}
                self.server = LayoutServer(self.path, record, **about)
            except Killed:
                self.injector.kill(self.keeper)
                return
            except (OSError, EplbError):
                self.events["keepers that did not start"] += 1
                left = self.injector.open_of(self.keeper)
                if left:
                    raise TruthError(f"a server that did not start leaves {left} descriptors open") from None
                return

    def _check_opened(self, record: LayoutRecord) -> None:
        if not record.state.dirty and not np.array_equal(record.layout.physical_to_logical_map, self.weights):
            raise TruthError(f"a restarted keeper says {record.state}, and the weights hold {self.weights.tolist()}")

    def kill_keeper(self) -> None:
        """SIGKILL."""
        if self.server is not None:
            self.server, self.stopped = None, False
            self.injector.kill(self.keeper)
            self.events["keepers killed"] += 1

    def close_keeper(self) -> None:
        """In good order."""
        if self.server is not None and not self.stopped:
            server, self.server = self.server, None
            with self.injector.under(self.keeper):
                try:
                    server.close()
                except Killed:
                    self.injector.kill(self.keeper)
            if self.injector.open_of(self.keeper):
                raise TruthError("a server that was closed leaves descriptors open")

    def load_anew(self) -> None:
        """All of it, when nobody is there any more."""
        if not self.engines:
            self.kill_keeper()
            self.memory, self.weights = f"{self.memory}+", LAYOUT.physical_to_logical_map.copy()
            self.start_keeper()

    def stop_keeper(self) -> None:
        """SIGSTOP, and SIGCONT the next time."""
        self.stopped = self.server is not None and not self.stopped

    def pump(self) -> None:
        """Let the keeper do all that it has to do."""
        if self.server is None or self.stopped or self._pumping:
            return
        self._pumping = True
        loop = self.server._loop
        try:
            with self.injector.under(self.keeper):
                for _ in range(50):
                    if not loop.turn(0):
                        raise TruthError("the server's loop has ended")
                    if not loop._selector.ready and not loop._more:  # type: ignore[attr-defined]
                        break
        except Killed:
            self.kill_keeper()
        finally:
            self._pumping = False

    # ---- engines -------------------------------------------------------------------------------------------------

    def _ask(self, engine: Engine, call: Callable[..., T], *arguments: Any) -> T | None:
        """What the call gives; None if it raised what it may, or the engine has died of it."""
        engine.asks = True
        try:
            with self.injector.under(engine.name):
                return call(*arguments)
        except Killed:
            self.end(engine)
        except EplbError:
            self.events["requests without an answer"] += 1
        finally:
            engine.asks = False
        return None

    def start(self, kind: str) -> None:
        """An engine that maps the weights if it is let; `old` says no layout and is not attached."""
        if len(self.engines) >= MOST:
            return
        engine = Engine(f"e{self.events['engines']}", kind)
        self.events["engines"] += 1
        self.engines.append(engine)
        options: Any = {"deadline": 1.0, "attach": kind != "old"}
        with self.injector.under(engine.name):
            try:
                engine.client = LayoutClient(self.path, engine.name, **options)  # raises nothing
            except Killed:
                self.end(engine)
                return
        found, error = engine.client.found, engine.client.error
        if found is None or error is not None:
            self.leave(engine)
            return
        layout, engine.client.adopted = found.layout, found.version
        digest = "" if kind == "old" else layout.digest
        reply = self._ask(engine, engine.client.fetch, {}, digest, {})
        if reply is None or reply[0]["status"] != "ok" or not reply[1]:
            self.leave(engine)
            return
        for fd in reply[1]:
            os.close(fd)
        if engine in self.engines:
            # An old one has the layout that weights are loaded in, and no other.
            engine.routes = (LAYOUT if kind == "old" else layout).physical_to_logical_map
            engine.version = found.version
            self.events["engines that mapped the weights"] += 1

    def follow(self, engine: Engine) -> None:
        """Register as a follower."""
        if engine.routes is None or engine.client is None or engine.kind == "old":
            return
        reply = self._ask(engine, engine.client.follow, self._digest(engine.routes))
        engine.follows = engine.follows or (reply is not None and reply.status == "ok")

    def poll(self, engine: Engine) -> None:
        """A follower looks at the record, and stops or goes on."""
        if not engine.follows or engine.ended or engine.client is None or engine.moves is not None:
            return
        state = self._ask(engine, engine.client.query)
        if state is None or engine.ended:
            return
        asked = engine.client.engine_id in state.awaited and state.version == engine.version
        if engine.stopped and not state.dirty and (state.pending is None or state.version != engine.version):
            engine.routes, engine.version = state.layout.physical_to_logical_map, state.version
            engine.stopped = False
            self.events["followers that went on"] += 1
        elif asked or state.dirty:
            engine.stopped = True
            if asked:
                self._ask(engine, engine.client.hold, engine.version, state.begun)

    def _wait(self, seconds: float) -> None:
        """Somebody sleeps: followers poll."""
        for engine in list(self.engines):
            if not engine.asks:
                self.poll(engine)

    def begin(self, engine: Engine, layer: int) -> None:
        """Ask to move; no other engine that lives may read the layer then."""
        if engine.routes is None or engine.client is None or engine.stopped or engine.off or engine.moves is not None:
            return
        reply = self._ask(engine, engine.client.begin, [layer], engine.version)
        if reply is None or engine.ended or reply.status != "ok":
            return
        self.events["moves begun"] += 1
        readers = [o.name for o in self.engines if o is not engine and o.routes is not None and not o.stopped]
        if readers:
            raise TruthError(f"{engine.name} may move layer {layer}, and {', '.join(readers)} reads it")
        engine.moves, engine.wrote = layer, False

    def write(self, engine: Engine, row: int) -> None:
        """Other experts into the slots."""
        if engine.moves is not None:
            self.weights[engine.moves] = ROWS[row]
            engine.routes, engine.wrote = self.weights.copy(), True

    def commit(self, engine: Engine) -> None:
        """Say what the slots hold; who is not heard moves nothing any more."""
        if engine.moves is None or engine.client is None or not engine.wrote:
            return
        layer, engine.moves = engine.moves, None
        reply = self._ask(engine, engine.client.commit, [layer], [self.weights[layer].tolist()])
        if reply is None or reply.status != "ok":
            engine.off = True
            return
        if reply.digest != self._digest(self.weights) or reply.version is None:
            raise TruthError(f"{engine.name} committed {self._digest(self.weights)}, and {reply} is recorded")
        engine.version = reply.version
        self.events["moves committed"] += 1

    def abort(self, engine: Engine) -> None:
        """Take back what was begun and not written."""
        if engine.moves is not None and engine.client is not None and not engine.wrote:
            engine.moves = None
            self._ask(engine, engine.client.abort, [0])
            self._ask(engine, engine.client.abort, [1])

    def leave(self, engine: Engine) -> None:
        """In good order, so that nothing of it stays open; if it leaves in a move, as a crash would."""
        if engine.client is not None:
            self._ask(engine, engine.client.close)
            if not engine.ended and self.injector.open_of(engine.name):
                raise TruthError(f"{engine.name} has closed its client, and descriptors of it are open")
        self.end(engine)

    def end(self, engine: Engine) -> None:
        """SIGKILL, or the end of a process."""
        if not engine.ended:
            engine.ended = True
            self.engines.remove(engine)
            self.injector.kill(engine.name)

    def _digest(self, rows: Any) -> str:
        return ExpertLayout(rows, 4, topology=LAYOUT.topology).digest

    # ---- the truth -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Who serves routes by the weights; who lives is known to the keeper; the file is whole."""
        for engine in self.engines:
            if engine.routes is not None and not engine.stopped and not np.array_equal(engine.routes, self.weights):
                raise TruthError(f"{engine.name} routes by {engine.routes.tolist()}, {self.weights.tolist()} is there")
        if self.file.exists():
            found = self.file.stat()
            if (found.st_ino, found.st_mtime_ns) != self._read[0]:
                self._read = (found.st_ino, found.st_mtime_ns), load_record(self.file)[0]
            self._check_known(self._read[1], "the file")
        if self.server is not None and self.server.state is not None:
            self._check_known(self.server.state, "the keeper")

    def _check_known(self, state: RecordState, who: str) -> None:
        if state.dirty:
            return
        unseen = 0
        for engine in self.engines:
            if engine.routes is None or engine.client is None or engine.client.engine_id in state.engines:
                continue
            unseen += 1
            name = "unnamed" if engine.kind == "old" else engine.client.engine_id
            named = any(each == name or each.startswith(f"{name} (") for each in state.non_followers)
            if not named and state.num_non_followers == len(state.non_followers):
                raise TruthError(f"{engine.name} lives, and {who} says {state}")
        if unseen > state.num_non_followers:
            raise TruthError(f"{unseen} engines live that are not attached, and {who} says {state}")

    def finish(self) -> None:
        """All processes end without a fault; nothing of them is left."""
        self.armed, self.stopped = None, False
        self.lacks.clear()
        self.pump()
        self.check()
        for engine in list(self.engines):
            self.leave(engine)
        self.pump()
        self.close_keeper()
        self.start_keeper()  # removes what killed writers left, also where the last start could not
        if self.server is None:
            raise TruthError("no keeper can be started any more")
        self.check()
        self.close_keeper()
        left = {each.name for each in self.file.parent.iterdir()}
        if not left <= {"s.lock", "record", "record.lock"}:
            raise TruthError(f"left in the folder: {sorted(left)}")
        descriptors = len(os.listdir("/proc/self/fd"))
        if descriptors != self.descriptors:
            raise TruthError(f"{self.descriptors} descriptors were open before, {descriptors} are now")


class Weights:
    """A host's memory."""

    def difference(self, config: Any, frame: Any) -> None:
        return None

    def about(self) -> dict[str, Any]:
        return {}

    def export(self) -> tuple[dict[str, Any], list[int]]:
        return {}, [MEMORY]


STEP_WEIGHTS = {
    "start": 4,
    "start old": 0.2,
    "follow": 6,
    "poll": 5,
    "begin": 10,
    "write": 7,
    "commit": 7,
    "abort": 1,
    "leave": 2,
    "kill": 0.7,
    "pump": 2,
    "kill keeper": 0.4,
    "close keeper": 0.3,
    "start keeper": 8,
    "stop keeper": 0.7,
    "load anew": 3,
    "lack": 0.5,
}


FIRST = ("start", "start", "follow")
"""Steps of every schedule, so that there is something to break."""


def _can(engine: Engine, step: str) -> bool:
    """Whether the step does something with this engine."""
    if step in ("write", "commit", "abort"):
        return engine.moves is not None and engine.wrote == (step == "commit")
    if step == "follow":
        return engine.routes is not None and not engine.follows
    return step != "begin" or (engine.routes is not None and not engine.stopped and not engine.off)


def take(world: World, step: str, number: int) -> None:
    """One step by its name; `number` says whose, and of what."""
    among = [each for each in world.engines if _can(each, step)] or world.engines
    engine = among[number % len(among)] if among else None
    about_engine: dict[str, Callable[[Engine], None]] = {
        "follow": world.follow,
        "poll": world.poll,
        "begin": lambda each: world.begin(each, number // 7 % LAYERS),
        "write": lambda each: world.write(each, number // 7 % len(ROWS)),
        "commit": world.commit,
        "abort": world.abort,
        "leave": world.leave,
        "kill": world.end,
    }
    if step in about_engine:
        if engine is not None:
            about_engine[step](engine)
    elif step.startswith("start") and not step.endswith("keeper"):
        world.start("old" if step == "start old" else "new")
    elif step == "lack":
        world.lack(("keeper", "engines")[number % 2], ("descriptors", "disk", *["nothing"] * 4)[number // 7 % 6])
    else:
        {
            "pump": world.pump,
            "kill keeper": world.kill_keeper,
            "close keeper": world.close_keeper,
            "start keeper": world.start_keeper,
            "stop keeper": world.stop_keeper,
            "load anew": world.load_anew,
        }[step]()
    world.pump()
    world.check()


class NoExceptions(logging.Handler):
    """The library's log: an exception in it is a fault that it did not expect."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.met.append(self.format(record))


def schedule(seed: int, folder: Path, injector: Injector, steps: int = STEPS) -> World:
    """One random schedule, the same for a seed; `injector` is installed."""
    for each in folder.iterdir():
        each.unlink()
    chance = random.Random(seed)
    world = World(folder, injector)
    world.start_keeper()
    rate = chance.choice((0.02, 0.15, 0.5))
    for number in range(steps):
        if chance.random() < rate:
            world.arm(Fault(min(int(chance.expovariate(0.12)), 60), chance.randrange(1 << 16)))
        (step,) = FIRST[number : number + 1] or chance.choices(list(STEP_WEIGHTS), list(STEP_WEIGHTS.values()))
        take(world, step, chance.randrange(1 << 16))
    world.finish()
    return world
