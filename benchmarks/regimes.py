"""The Balancer against the best fixed setting in hindsight, on many kinds of traffic.

    python -m benchmarks.regimes -n 16 --json regimes.json
    python -m benchmarks.regimes -n 16 --part 1/4 --json part1.json        # and so on; then
    python -m benchmarks.regimes --merge part*.json --json regimes.json
    python -m benchmarks.regimes --policy balancer --json new.json         # then --merge part*.json new.json: later
                                                                           # rows stand in place of earlier ones
    python -m benchmarks.regimes --speed                                   # what a call takes of one core

A fixed setting calls `place` from the live layout every so many windows, on so many of the last ones (`history`), which
all weigh the same or lose half of their weight over half of them, with one price. All settings of the grid are
replayed; the mark is the best of them for the regime, over all seeds, chosen in hindsight ("seed by seed" chooses for
each). Clairvoyant is `place` every 8 windows on the 8 that come, at the best of the same prices. What is judged is
utility: balancedness that equal shares realize on the windows that follow, less `move_cost` x transfers per window and
layer. Every policy starts from the trivial layout at window 32; its first placement is nearly free, and not counted.
The Balancer is told `move_cost` and nothing else.

Traffic is drawn from loads of 28 tenants (languages and code) of a 128-expert, top-8 model, four of its 16 layers: a
window draws 16 texts of tenants, each routed as in one recorded window, and then its tokens. 144 slots on 16 ranks.
"recorded" is the same model's recorded drift, other layers for each seed. `--olmoe FILE` adds OLMoE's six domains (3
layers of 64 experts, 72 slots on 8 ranks).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

import eplb_core as eplb
from benchmarks import measure, traces

Load: TypeAlias = npt.NDArray[np.float64]
Row: TypeAlias = dict[str, Any]

START, WINDOWS, TOKENS = 32, 352, 8192
TEXT, FEWEST_TEXTS = 512, 8
"""Tokens of a text, all of one tenant, and texts of the smallest window: what makes windows differ beside the draw."""
MOVE_COSTS = (1e-2, 1e-3)
EVERY, HISTORY = (1, 2, 4, 8, 16, 32), (8, 16, 32, 64, 128, 256)
HALF_LIVES = (math.inf, 0.5)
"""As a part of the history; the second for 64 windows and more."""
LONG, SELDOM = 256, 4
"""So long a history is seen every 4 windows or less often: it takes long, and is no better."""
PRICES = (6e-6, 2e-5, 6e-5, 2e-4, 6e-4)
"""The first is for the lower move cost."""
MIN_GAIN, FIRST_PRICE = 0.002, 1e-6
QUICK = ("recorded", "switches, 20", "prefill, decode")
KNOWN = 8
"""Windows that clairvoyance sees."""
LARGE = (58, 256, 32, 288)
"""Layers, experts, ranks and slots where calls are timed."""
FULL, SETTLE = 150, 20
"""Windows that fill the memory, and calls before any is timed: at the first, all layers are looked at."""
WAKE_S, SWITCH_S = 50e-6, 10e-6
"""A thread that wants to run so often, and after how long Python makes another let it."""


class Model(NamedTuple):
    """Loads of a model's tenants, and where it runs."""

    tenants: Load
    """Shares of each layer, `[tenants, samples, L, E]`."""
    ranks: int
    slots: int
    top_k: int


def moe128() -> Model:
    with np.load(traces.DATA / "moe128_domains.npz") as file:
        load = file["domain_load"].astype(np.float64)
    return Model(load / load.sum(axis=3, keepdims=True), 16, 144, 8)


def olmoe(path: Path) -> Model:
    with np.load(path) as file:
        load = file["load"].astype(np.float64)[:, None]
    return Model(load / load.sum(axis=3, keepdims=True), 8, 72, 8)


# ---- traffic: from a model and a generator to the mixture [T, tenants] and the tokens [T] of the windows


def _some(model: Model, rng: np.random.Generator) -> Load:
    """A mixture in which few tenants matter."""
    mixture: Load = rng.dirichlet(np.full(len(model.tenants), 0.3))
    return mixture


def _walk(model: Model, rng: np.random.Generator, step: float) -> Load:
    state = rng.standard_normal(len(model.tenants))
    out = []
    for _ in range(WINDOWS):
        state = math.sqrt(1.0 - step**2) * state + step * rng.standard_normal(len(state))
        out.append(np.exp(2.0 * state) / np.exp(2.0 * state).sum())
    return np.stack(out)


def drift(model: Model, rng: np.random.Generator) -> Load:
    return _walk(model, rng, 0.1)


def stationary(model: Model, rng: np.random.Generator) -> Load:
    return np.tile(_some(model, rng), (WINDOWS, 1))


def switches(every: int) -> Callable[[Model, np.random.Generator], Load]:
    def made(model: Model, rng: np.random.Generator) -> Load:
        phases = [_some(model, rng) for _ in range(-(-WINDOWS // every))]
        return np.repeat(np.stack(phases), every, axis=0)[:WINDOWS]

    return made


def returning(model: Model, rng: np.random.Generator) -> Load:
    both: Load = np.stack([_some(model, rng), _some(model, rng)])[np.arange(WINDOWS) // 32 % 2]
    return both


def day_and_night(model: Model, rng: np.random.Generator) -> Load:
    day, night = _some(model, rng), _some(model, rng)
    part = (0.5 + 0.5 * np.sin(np.arange(WINDOWS) * (2.0 * np.pi / 128)))[:, None]
    mixture: Load = day * part + night * (1.0 - part)
    return mixture


def bursts(model: Model, rng: np.random.Generator) -> Load:
    usual, other = _some(model, rng), _some(model, rng)
    return np.where((np.arange(WINDOWS) % 90 < 8)[:, None] & (np.arange(WINDOWS) >= 90)[:, None], other, usual)


def slow_drift(model: Model, rng: np.random.Generator) -> Load:
    return _walk(model, rng, 0.03)


def mixed(model: Model, rng: np.random.Generator) -> Load:
    """Prefill and decode are other mixtures; which a window is, is drawn (`_tokens` tells them apart by size)."""
    return _walk(model, rng, 0.03)


REGIMES: dict[str, Callable[[Model, np.random.Generator], Load]] = {
    "drift": drift,
    "stationary": stationary,
    "switches, 20": switches(20),
    "switches, 100": switches(100),
    "returning, 64": returning,
    "day and night": day_and_night,
    "512 tokens": slow_drift,
    "bursts": bursts,
    "model update": slow_drift,
    "prefill, decode": mixed,
}


def traffic(name: str, model: Model, seed: int) -> Load:
    """Windows `[T, L, E]` of a regime."""
    rng = np.random.default_rng([seed, *name.encode()])
    mixture = REGIMES[name](model, rng)
    tokens = np.full(WINDOWS, TOKENS)
    shares = model.tenants
    if name == "512 tokens":
        tokens[:] = 512
    if name == "day and night":
        tokens = (TOKENS * (0.6 + 0.4 * np.sin(np.arange(WINDOWS) * (2.0 * np.pi / 128)))).astype(np.int64)
    decode = rng.random(WINDOWS) < 0.5 if name == "prefill, decode" else np.zeros(WINDOWS, dtype=np.bool_)
    tokens[decode] = 512
    turned = np.stack([rng.permutation(shares.shape[3]) for _ in range(shares.shape[2])])
    out = np.zeros((WINDOWS, *shares.shape[2:]))
    for t in range(WINDOWS):
        picked = shares[np.arange(len(shares)), rng.integers(0, shares.shape[1], len(shares))]
        texts = max(int(tokens[t]) // TEXT, FEWEST_TEXTS)
        drawn = rng.multinomial(texts, np.roll(mixture[t], 3) if decode[t] else mixture[t])
        rate = np.tensordot(drawn / texts, picked, axes=1)
        if name == "model update" and t >= WINDOWS // 2:
            rate = np.take_along_axis(rate, turned, axis=1)
        out[t] = [rng.multinomial(tokens[t] * model.top_k, row / row.sum()) for row in rate]
    return out


def recorded(seed: int) -> Load:
    """The drift that ships, four layers of it."""
    return traces.drift_load()[:, seed % 4 :: 4].astype(np.float64)


# ---- policies: from a load to what they reach


class Setting(NamedTuple):
    """A fixed setting, or "balancer" and "clairvoyant" with a cost or a price."""

    policy: str
    every: int = 1
    history: int = 0
    half_life: float = math.inf
    price: float = 0.0


def replay(load: Load, model: Model, setting: Setting) -> tuple[float, float, float, list[float]]:
    """Live through a load.

    Returns:
        Mean balancedness; transfers per window and layer without the first placement, in all and after 64 windows; the
        balance of each window.
    """
    topology = eplb.Topology(model.ranks)
    live = eplb.ExpertLayout.trivial(load.shape[1], load.shape[2], num_slots=model.slots, topology=topology)
    balancer = eplb.Balancer(topology, num_slots=model.slots, move_cost=setting.price)
    balancer.observe(load[:START])
    balance, received = [], []
    for t in range(START, len(load)):
        chosen = live
        if setting.policy == "balancer":
            if t > START:
                balancer.observe(load[t - 1])
            chosen = balancer.propose(live).layout
        elif (t - START) % setting.every == 0:
            chosen = _fixed(load, t, live, model, setting, FIRST_PRICE if t == START else setting.price)
        received.append(0 if chosen is live else int(eplb.transfers(live, chosen).sum()))
        live = chosen
        balance.append(eplb.mean_balancedness(eplb.rank_load(live, load[t])))
    first = next((i for i, moved in enumerate(received) if moved), 0)
    received[first] = 0
    rate, late = (sum(received[since:]) / max(len(received) - since, 1) / load.shape[1] for since in (0, 64))
    return float(np.mean(balance)), rate, late, balance


def _fixed(
    load: Load, t: int, live: eplb.ExpertLayout, model: Model, setting: Setting, price: float
) -> eplb.ExpertLayout:
    if setting.policy == "clairvoyant":
        seen = load[t : t + KNOWN]
    else:
        seen = load[max(t - setting.history, 0) : t]
    age = np.arange(len(seen))[::-1]
    weights = 0.5 ** (age / (setting.half_life * setting.history)) if math.isfinite(setting.half_life) else None
    return eplb.place(
        seen,
        live.topology,
        num_slots=model.slots,
        current=live,
        window_weights=weights,
        transfer_price=price,
        min_gain=MIN_GAIN,
    ).layout


# ---- tasks, in processes


class Task(NamedTuple):
    """Settings that are replayed on one load, one after another."""

    model: str
    regime: str
    seed: int
    settings: tuple[Setting, ...]


def tasks(models: Sequence[str], *, quick: bool, seeds: int, only: str, policy: str = "") -> list[Task]:
    """Those that take longest first; of one policy, where it is given."""
    every, history, prices = (EVERY, HISTORY, PRICES) if not quick else ((16,), (16,), (1e-4,))
    found = []
    for model, regime, seed in itertools.product(models, ["recorded", *REGIMES], range(seeds)):
        if (regime == "recorded" and model != "moe128") or only not in regime:
            continue
        if quick and regime not in QUICK:
            continue
        own = tuple(Setting("balancer", price=cost) for cost in MOVE_COSTS)
        known = tuple(Setting("clairvoyant", KNOWN, price=price) for price in prices)
        found += [Task(model, regime, seed, own), Task(model, regime, seed, known)]
        for often, seen, half_life in itertools.product(every, history, HALF_LIVES):
            if (half_life < 1 and seen < 64) or (seen >= LONG and often < SELDOM):
                continue
            fixed = tuple(Setting("fixed", often, seen, half_life, price) for price in prices)
            found.append(Task(model, regime, seed, fixed))
    found = [task for task in found if policy in ("", task.settings[0].policy)]
    return sorted(found, key=lambda task: -task.settings[0].history / task.settings[0].every)


def run(task: Task, olmoe_path: Path | None, quick: bool) -> list[Row]:
    """Rows of a task's settings."""
    model = moe128() if task.model == "moe128" or olmoe_path is None else olmoe(olmoe_path)
    load = recorded(task.seed) if task.regime == "recorded" else traffic(task.regime, model, task.seed)
    if quick:
        load = load[: START + 24, :1]
    rows = []
    for setting in task.settings:
        balance, moved, late, windows = replay(load, model, setting)
        row: Row = {**task._asdict(), **setting._asdict(), "balancedness": balance, "transfers": moved}
        row["half_life"] = setting.half_life if math.isfinite(setting.half_life) else None
        del row["settings"]
        if setting.policy == "balancer":
            row["windows"] = [round(value, 5) for value in windows]
            row["late_transfers"] = late
        rows.append(row)
    return rows


# ---- marks and regrets


def judge(rows: Sequence[Row]) -> list[Row]:
    """For each regime and move cost: what the Balancer, the best setting and clairvoyance reach, mean over seeds."""
    cases: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        cases[row["model"], row["regime"]].append(row)
    judged = []
    for (model, regime), each in sorted(cases.items()):
        for cost in MOVE_COSTS:
            own = [row for row in each if row["policy"] == "balancer" and row["price"] == cost]
            marks = [row for row in each if row["policy"] == "fixed"]
            if own and marks:
                known = [row for row in each if row["policy"] == "clairvoyant"]
                judged.append({"model": model, "regime": regime, "move_cost": cost, **_judged(own, marks, known, cost)})
    return judged


def _judged(own: list[Row], fixed: list[Row], known: list[Row], cost: float) -> Row:
    mine = {row["seed"]: row["balancedness"] - cost * row["transfers"] for row in own}
    mark, setting, by_seed = _best(fixed, cost)
    found: Row = {name: float(np.mean([row[name] for row in own])) for name in ("balancedness", "transfers")}
    found |= {"utility": float(np.mean(list(mine.values()))), "best": mark, "best_setting": setting}
    found["clairvoyant"] = _best(known, cost)[0] if known else None
    found["regret"] = mark - found["utility"]
    found["regret_seed_by_seed"] = {seed: by_seed[seed] - mine[seed] for seed in sorted(mine)}
    if own[0]["regime"] == "switches, 100":
        found["after_switch"] = float(np.mean([_after_switches(row["windows"]) for row in own]))
    if own[0]["regime"] == "stationary":
        found["late_transfers"] = max(row["late_transfers"] for row in own)
    return found


def _best(rows: list[Row], cost: float) -> tuple[float, Row, dict[int, float]]:
    """Utility of the setting that is best in the mean over seeds, the setting, and each seed's best utility."""
    settings: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    by_seed: dict[int, float] = {}
    names = ("every", "history", "half_life", "price")
    for row in rows:
        utility = row["balancedness"] - cost * row["transfers"]
        settings[tuple(row[name] for name in names)].append(utility)
        by_seed[row["seed"]] = max(utility, by_seed.get(row["seed"], -math.inf))
    best = max(settings, key=lambda setting: float(np.mean(settings[setting])))
    return float(np.mean(settings[best])), dict(zip(names, best, strict=True)), by_seed


def _after_switches(windows: Sequence[float]) -> float:
    """How far balance is from its new level 6 to 13 windows after a switch, mean over switches."""
    far = []
    for at in range(100 - START, len(windows) - 60, 100):
        level = np.mean(windows[at + 30 : at + 100])
        far.append(float(level - np.mean(windows[at + 6 : at + 14])))
    return float(np.mean(far)) if far else math.nan


def print_table(judged: Sequence[Row]) -> None:
    """A line for each regime and move cost."""
    names = ("balancedness", "transfers", "utility", "best", "clairvoyant", "regret")
    table = []
    for row in judged:
        figures = ["" if row[name] is None else f"{row[name]:.4f}" for name in names]
        worst = f"{max(row['regret_seed_by_seed'].values()):.4f}"
        setting = " ".join(str(value) for value in row["best_setting"].values())
        table.append([f"{row['model']}: {row['regime']}", f"{row['move_cost']:g}", *figures, worst, setting])
    head = ["traffic", "move cost", "balance", "moves", "utility", "best fixed", "clairvoyant", "regret"]
    print(measure.table([*head, "worst, seed by seed", "best: every, history, half-life, price"], table))
    print(f"mean regret {_mean_regret(judged):.4f}")
    for row in judged:
        for name in ("after_switch", "late_transfers"):
            if name in row:
                print(f"{row['model']}: {row['regime']}, {row['move_cost']:g}: {name} {row[name]:.4f}")


def _mean_regret(judged: Sequence[Row]) -> float:
    return float(np.mean([row["regret"] for row in judged]))


def _part(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} must be as 2/8: the second of eight parts")
    return int(number), int(of)


_SETTING = ("model", "regime", "seed", "policy", "every", "history", "half_life", "price")


def merged(records: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows of records, later ones in place of earlier ones of the same setting; and how many are of which record."""
    rows: dict[tuple[Any, ...], tuple[int, Row]] = {}
    for i, record in enumerate(records):
        for row in record["rows"]:
            rows[tuple(row.get(name) for name in _SETTING)] = (i, row)
    parts = []
    for i, record in enumerate(records):
        used = [row["policy"] for part, row in rows.values() if part == i]
        counts = {policy: used.count(policy) for policy in sorted(set(used))}
        parts.append({"environment": record["environment"], "rows": counts})
    return [row for _, row in rows.values()], parts


def _run(options: argparse.Namespace) -> Iterator[Row]:
    models = ["moe128", *(["olmoe"] if options.olmoe else [])]
    seeds = 1 if options.quick else options.seeds
    number, of = options.part
    mine = tasks(models, quick=options.quick, seeds=seeds, only=options.only, policy=options.policy)
    mine = mine[number - 1 :: of]
    if options.processes == 1:
        for task in mine:
            yield from run(task, options.olmoe, options.quick)
        return
    with ProcessPoolExecutor(options.processes) as pool:
        for rows in pool.map(run, mine, itertools.repeat(options.olmoe), itertools.repeat(options.quick)):
            yield from rows


class Alarm:
    """A thread that wants to run every `WAKE_S`: how long was it kept from the interpreter at most?"""

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._wake, daemon=True)

    def __enter__(self) -> Alarm:
        self._usual = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)  # else Python itself lets a thread run for 5 ms
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        sys.setswitchinterval(self._usual)

    def _wake(self) -> None:
        while not self._over.is_set():
            start = time.perf_counter()
            time.sleep(WAKE_S)
            self.longest = max(self.longest, time.perf_counter() - start - WAKE_S)

    def take(self) -> float:
        """Seconds since it was asked last."""
        longest, self.longest = self.longest, 0.0
        return longest


def holds(calls: int) -> Row:
    """Microseconds that `Alarm` is kept waiting in a call; also while this thread sleeps, and in one without the lock.

    The last is what the machine alone takes: only more than that is the library's.
    """
    text = bytes(10_000_000)
    waits: dict[str, list[float]] = defaultdict(list)
    with Alarm() as alarm:
        for _ in range(calls):
            alarm.take()
            time.sleep(0.02)
            waits["no call"].append(1e6 * alarm.take())
            _alarmed(alarm, waits["a hash, without the lock"], partial(hashlib.sha256, text))
        speed(calls, lambda name, call: _alarmed(alarm, waits[name], call))
    return {
        name: {"median_us": round(statistics.median(each)), "max_us": round(max(each))} for name, each in waits.items()
    }


def _alarmed(alarm: Alarm, waits: list[float], call: Callable[[], Any]) -> Any:
    alarm.take()
    answer = call()
    waits.append(1e6 * alarm.take())
    return answer


def first_placement() -> float:
    """Seconds of this thread for the first placement of all layers with a full memory."""
    layers, experts, ranks, slots = LARGE
    rng = np.random.default_rng(0)
    balancer = eplb.Balancer(eplb.Topology(ranks), num_slots=slots)
    live = eplb.ExpertLayout.trivial(layers, experts, num_slots=slots, topology=eplb.Topology(ranks))
    fondness = rng.gamma(2.0, 1.0, (layers, experts))
    for _ in range(FULL):
        balancer.observe(rng.poisson(fondness / fondness.sum(axis=1, keepdims=True) * 8 * TOKENS))
    start = time.thread_time()
    balancer.propose(live)
    return time.thread_time() - start


def speed(calls: int, through: Callable[[str, Callable[[], Any]], Any] = lambda _, call: call()) -> Row:
    """Milliseconds of this thread for `observe` and `propose`, full memory: minimum, median and most of so many calls.

    Of even traffic, of one whose experts' loads change by 2% each window, and of the windows after a sudden change,
    in which all layers are looked at. Timed calls go `through` a function that gets their name and the call.
    """
    layers, experts, ranks, slots = LARGE
    times: dict[str, list[float]] = defaultdict(list)
    for drift, changes in ((0.0, False), (0.02, False), (0.0, True)):
        rng = np.random.default_rng(0)
        balancer = eplb.Balancer(eplb.Topology(ranks), num_slots=slots)
        live = eplb.ExpertLayout.trivial(layers, experts, num_slots=slots, topology=eplb.Topology(ranks))
        fondness = rng.gamma(2.0, 1.0, (layers, experts))
        for window in range(FULL + SETTLE + calls):
            fondness = fondness * np.exp(drift * rng.normal(size=fondness.shape))
            if changes and window == FULL + SETTLE:
                fondness = rng.permuted(fondness, axis=1)
            load = rng.poisson(fondness / fondness.sum(axis=1, keepdims=True) * 8 * TOKENS)
            timed = through if window >= FULL + SETTLE else lambda _, call: call()
            start = time.thread_time()
            timed("observe", partial(balancer.observe, load))
            seen = time.thread_time()
            if window < FULL:
                continue
            placed = timed("propose", partial(balancer.propose, live))
            end, live = time.thread_time(), placed.layout
            if window >= FULL + SETTLE:
                moves = "something moves" if placed.transfers.any() else "nothing moves"
                times["observe"].append(1e3 * (seen - start))
                times[f"propose, {'after a change' if changes else moves}"].append(1e3 * (end - seen))
    return {
        what: {
            "calls": len(each),
            "min_ms": round(min(each), 2),
            "median_ms": round(statistics.median(each), 2),
            "max_ms": round(max(each), 2),
        }
        for what, each in times.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("regimes", __doc__, quick="three regimes, one layer, 24 windows, one setting, one seed")
    parser.add_argument("-n", "--processes", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", type=_part, default=(1, 1), help="as 2/8: the second of eight parts of the tasks")
    parser.add_argument("--merge", type=Path, nargs="+", help="records of parts, in place of running")
    parser.add_argument("--olmoe", type=Path, help="olmoe_domains.npz: `load [6, 3, 64]`")
    parser.add_argument("--only", default="", help="regimes with this in their name")
    parser.add_argument("--policy", default="", choices=("balancer", "clairvoyant", "fixed"), help="this alone")
    parser.add_argument("--speed", action="store_true", help="what calls take of one core, in place of regimes")
    options = parser.parse_args(argv)
    measure.one_thread()
    if options.speed:
        calls = 4 if options.quick else 60
        took, waits, first_s = speed(calls), holds(calls), first_placement()
        head = ["58 layers x 256 experts, 128 windows", "calls", "min ms", "median ms", "most ms"]
        cells = [[what, *(f"{one[name]:.4g}" for name in one)] for what, one in took.items()]
        print(measure.table(head, cells))
        cells = [[what, *(f"{one[name]}" for name in one)] for what, one in waits.items()]
        print(measure.table(["a thread that wakes every 50 us", "waits us, median", "most us"], cells))
        print(f"first placement of all layers: {first_s:.2f} s")
        summary = [f"{what}: {one['median_ms']:.3g} ms, {one['max_ms']:.3g} at most" for what, one in took.items()]
        record = {"summary": summary, "shape": LARGE, "speed": took, "waits": waits, "first_s": round(first_s, 2)}
        measure.write_json(options.json, record)
        return 0
    parts: list[Row] = []
    if options.merge:
        rows, parts = merged([json.loads(path.read_text("utf-8")) for path in options.merge])
    else:
        rows = list(_run(options))
    judged = judge(rows)
    if judged:
        print_table(judged)
    kept = rows
    if judged and options.part == (1, 1):  # the marks say what the settings have reached
        names = (*_SETTING[:4], "price", "balancedness", "transfers", "late_transfers")
        kept = [{name: row[name] for name in names} for row in rows if row["policy"] == "balancer"]
    summary = []
    if judged:
        worst = max(judged, key=lambda row: row["regret"])
        text = f"mean regret {_mean_regret(judged):.4f}, worst {worst['regret']:.4f} ({worst['regime']})"
        summary = [f"regimes, Balancer against the best fixed setting: {text}"]
    measure.write_json(options.json, {"summary": summary, "judged": judged, "parts": parts, "rows": kept})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
