"""Replays of one trace over a grid of settings, in several processes, each row kept as soon as it is known."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from eplb_core._arrays import ArrayLike, check_call, check_int, check_kind, to_list
from eplb_core._text import quoted
from eplb_core._version import __version__
from eplb_core.files.reading import PathLike, check_path, write_atomic
from eplb_core.simulation.load.sources import TokenTrace
from eplb_core.simulation.replay import SimulateOptions, simulate
from eplb_core.simulation.result import Records
from eplb_core.topology import Topology
from eplb_core.trace import Trace, check_trace_load

if TYPE_CHECKING:
    from typing_extensions import Unpack


def sweep(
    trace: Trace | TokenTrace | ArrayLike,
    grid: Mapping[str, Sequence[Any]],
    *,
    workers: int = 1,
    results: PathLike | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[SimulateOptions],
) -> Records:
    """What do all combinations of these settings reach?

    Args:
        trace: A trace, windows `[T, L, E]`, or a `TokenTrace`, which one process replays.
        grid: Values to try for arguments of `simulate`, as in `{"num_slots": [256, 288], "interval": [8, 32]}`; all
            combinations are replayed. Besides those, `redundant_per_rank` ties slots to ranks: each rank has that many
            more than the fewest with which all ranks hold all experts, as in
            `{"topology": [Topology(8), Topology(16, 2)], "redundant_per_rank": [1]}`.
        workers: Processes. Each reads the trace from one file that all map.
        results: Folder that keeps each row as soon as it is known: combinations already there, for the same trace,
            settings and version, are not replayed again. Needs policies and dispatches by name.
        progress: Called with combinations done and in all; `with progress_bar("sweep") as step:` makes one.
        **options: Further arguments of `simulate`, the same for all. `score_from` is by default the largest interval
            of the grid, so that all rows are of the same windows.

    Returns:
        One row per combination, in the order of the grid.

    Raises:
        ValueError: As for `simulate`; the grid is empty; `redundant_per_rank` and slots are given; or a function where
            `results` or `workers` cannot keep one.

    Cost:
        A `simulate` for each combination.

    Example:
        >>> windows = np.array([[[1, 1, 9, 1]]] * 4)
        >>> rows = sweep(windows, {"num_slots": [4, 6]}, topology=Topology(2), interval=2)
        >>> rows.mean_balancedness.round(2).tolist()
        [0.6, 1.0]
    """
    check_call(progress, "progress")
    if not isinstance(grid, Mapping):
        raise TypeError(f"`grid` (={quoted(grid, 80)}) must be a dict of lists by name")
    names = list(grid)
    points = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(to_list(grid[name], "grid") for name in names))
    ]
    if not points:
        raise ValueError(f"`grid` (={quoted(dict(grid), 80)}) must have a value or more for each setting")
    load: Any = np.ascontiguousarray(trace.load if isinstance(trace, (Trace, TokenTrace)) else check_trace_load(trace))
    scored = {"score_from": max(intervals)} if (intervals := grid.get("interval")) else {}
    settings = [_with_slots({**scored, **options, **point}, load.shape[2]) for point in points]
    if check_int(workers, "workers", 1) > 1 and isinstance(trace, TokenTrace):
        raise ValueError(f"`workers` (={workers}) must be 1 for a TokenTrace")
    if results is not None or workers > 1:
        for setting in settings:
            _check_named(setting)
    rows: dict[int, dict[str, Any]] = {}
    tokens = {} if not isinstance(trace, TokenTrace) else {"ids": trace.topk_ids, "window_tokens": trace.window_tokens}
    paths = _result_paths(results, load, [{**setting, **tokens} for setting in settings])
    for at, path in enumerate(paths):
        if path is not None and path.exists():
            rows[at] = json.loads(path.read_text("utf-8"))
    todo = [at for at in range(len(settings)) if at not in rows]
    replayed: Iterable[tuple[int, dict[str, Any]]]
    if workers == 1 or len(todo) < 2:
        source = trace if isinstance(trace, TokenTrace) else Trace(load)
        replayed = ((at, simulate(source, **settings[at]).summary()) for at in todo)
    else:
        replayed = _replayed_by_processes(load, settings, todo, workers)
    for done, (at, row) in enumerate(replayed, start=len(rows) + 1):
        rows[at] = row
        path = paths[at]
        if path is not None:
            write_atomic(path, json.dumps(row).encode())
        if progress is not None:
            progress(done, len(settings))
    return Records.of_rows([rows[at] for at in range(len(settings))])


def slots_of(num_experts: int, num_ranks: int, redundant_per_rank: int) -> int:
    """Slots where each rank has so many more than the fewest with which all hold all experts."""
    return (-(-num_experts // num_ranks) + check_int(redundant_per_rank, "redundant_per_rank", 0)) * num_ranks


def _with_slots(setting: dict[str, Any], num_experts: int) -> dict[str, Any]:
    """The setting with `num_slots` in place of `redundant_per_rank`."""
    if "redundant_per_rank" not in setting:
        return setting
    spare = setting.pop("redundant_per_rank")
    for name in ("num_slots", "slots_per_rank"):
        if setting.get(name) is not None:
            raise ValueError(
                f"`redundant_per_rank` (={quoted(spare, 40)}) stands in place of `{name}`; give one of them"
            )
    topology = check_kind(setting.get("topology"), "topology", Topology)
    return {**setting, "num_slots": slots_of(num_experts, topology.num_ranks, spare)}


def _check_named(setting: Mapping[str, Any]) -> None:
    for name in ("policy", "dispatch"):
        if callable(setting.get(name)):
            raise ValueError(f"`{name}` (={setting[name]!r}) must be a name with `results` or several `workers`")


def _result_paths(results: PathLike | None, load: Any, settings: Sequence[Mapping[str, Any]]) -> Sequence[Path | None]:
    if results is None:
        return [None] * len(settings)
    folder = Path(check_path(results, "results"))
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(f"{load.dtype} {load.shape}".encode() + load.tobytes()).hexdigest()
    keys = [
        f"{__version__} {digest} {sorted((name, _text(value)) for name, value in each.items())}" for each in settings
    ]
    return [folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json" for key in keys]


def _text(value: Any) -> str:
    if isinstance(value, Topology):
        return f"{value.rank_to_node.tolist()} {value.rank_speed.tolist()}"
    if hasattr(value, "tolist"):  # the repr of long arrays and tensors leaves numbers out
        return f"{value.shape} {value.tolist()}"
    if isinstance(value, (list, tuple)):
        return str([_text(each) for each in value])
    if isinstance(value, Mapping):
        return str(sorted((name, _text(each)) for name, each in value.items()))
    return repr(value)


def _replayed_by_processes(
    load: Any, settings: Sequence[dict[str, Any]], todo: Sequence[int], workers: int
) -> Iterator[tuple[int, dict[str, Any]]]:  # pragma: no cover  starts processes: a test marked `long`
    spawn = multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="eplb_sweep") as folder, ProcessPoolExecutor(workers, spawn) as pool:
        path = f"{folder}/load.npy"
        np.save(path, load)
        futures = {pool.submit(_replay_file, path, settings[at]): at for at in todo}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _replay_file(path: str, setting: dict[str, Any]) -> dict[str, Any]:
    return simulate(np.load(path, mmap_mode="r"), **setting).summary()
