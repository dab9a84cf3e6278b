"""What arrays are taken for: loads, top-k ids, maps and others, as they are and cut, cast, turned, joined, misnamed.

Each array is saved as .npz and read by `load_trace`, as `eplb plan` reads it. An answer is a load, without or with a
doubt in its notes, or a refusal. With --data, the arrays of recordings are tried beside the generated ones.
"""

from __future__ import annotations

import io
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import eplb_core as eplb
from benchmarks import measure, traces
from eplb_core.errors import FileFormatError
from eplb_core.load import count_topk

Array = npt.NDArray[Any]
ANSWERS = ("load", "doubted", "refused")
NAMES = ("", "load", "topk_ids")


class Case(NamedTuple):
    """An array and what it is."""

    kind: str
    how: str
    array: Array


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("contents", __doc__, quick="fewer arrays")
    parser.add_argument("--data", type=Path, help="folder of .npz with recorded loads [T, L, E] and top-k ids")
    options = parser.parse_args(argv)
    answers = confusion(sources(options.data), options.quick)
    kinds = sorted({kind for kind, _, _ in answers})
    rows = [
        [f"{kind}, {f'named {name}' if name else 'unnamed'}", *counts(answers, kind, name)]
        for kind in kinds
        for name in NAMES
    ]
    print(measure.table(["what it was", *ANSWERS], rows))
    wrong, lost = faults(answers)
    lines = [
        f"{len(answers):,} arrays read: {len(wrong)} that are no load were taken for one without a doubt, "
        f"{len(lost)} loads were refused"
    ]
    print("\n" + "\n".join([*lines, *wrong, *lost]))
    record = {"summary": lines, "arrays": len(answers), "taken_for_a_load": wrong, "refused_loads": lost, "rows": rows}
    measure.write_json(options.json, record)
    return 0


Answers = dict[tuple[str, str, str], str]


def faults(answers: Answers) -> tuple[list[str], list[str]]:
    """What is no load, but was taken for one without a name or a doubt; loads that were refused under no wrong name."""
    wrong, lost = [], []
    for (kind, how, name), answer in answers.items():
        if kind != "load" and not name and answer == "load":
            wrong.append(f"{kind}: {how}")
        if kind == "load" and name != "topk_ids" and answer == "refused":
            lost.append(f"{how} {name}")
    return wrong, lost


def counts(answers: Answers, kind: str, name: str) -> list[str]:
    found = Counter(answer for (of, _, named), answer in answers.items() if (of, named) == (kind, name))
    return [str(found[answer]) for answer in ANSWERS]


def confusion(given: dict[str, tuple[list[Array], list[Array]]], quick: bool) -> Answers:
    """By kind, change and name of an array: what `load_trace` took it for."""
    answers: Answers = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.npz"
        for source, (loads, tokens) in given.items():
            for case in itertools.islice(cases(loads, tokens), 0, None, 7 if quick else 1):
                how = f"{source}: {case.how} {list(case.array.shape)} {case.array.dtype}"
                for name in NAMES:
                    answers[case.kind, how, name] = answer(path, case.array, name)
    return answers


def answer(path: Path, array: Array, name: str) -> str:
    """What `load_trace` takes an array for."""
    if name:
        np.savez(path, **{name: array})  # type: ignore[arg-type]
    else:
        stream = io.BytesIO()
        np.save(stream, array)
        path.write_bytes(stream.getvalue())
    try:
        notes = eplb.load_trace(path).notes
    except FileFormatError:
        return "refused"
    return "doubted" if any("; but " in note for note in notes) else "load"


# ---- what is tried ---------------------------------------------------------------------------------------------------


def sources(folder: Path | None) -> dict[str, tuple[list[Array], list[Array]]]:
    """Loads and top-k ids of each recording, and generated ones."""
    rng = np.random.default_rng(0)
    popular = rng.normal(scale=0.7, size=(8, 1, 64))
    tokens = np.argsort(-(popular + rng.gumbel(size=(8, 512, 64))), axis=2)[:, :, :6].transpose(1, 0, 2)
    found = {
        "generated": ([traces.generated_trace(num_windows=6, num_layers=12)], [tokens.astype(np.int16)]),
        "drift": ([traces.drift_load()[::32]], []),
    }
    for path in sorted(folder.glob("*.npz")) if folder is not None else ():
        loads, ids = [], []
        with np.load(path, allow_pickle=False) as file:
            for name in file.files:
                array = file[name]
                if "topk" in name and array.ndim == 3:
                    ids.append(array[:2048])
                elif name.endswith("load") or (array.ndim == 2 and name.startswith(("prefill", "decode"))):
                    loads += [array[:64]] if array.ndim < 4 else list(array[:3])
        found[path.stem] = (loads, ids)
    return found


def cases(loads: list[Array], tokens: list[Array]) -> Iterator[Case]:
    """Every array, and what may become of it on its way into a file."""
    for load in loads:
        yield from of_load(load if load.ndim == 3 else load[None])
    for ids in tokens:
        yield from of_tokens(ids)
        experts = int(ids.max()) + 1
        for size in (1, 2, 8, 32, 128, len(ids)):
            cut = ids[: len(ids) // size * size][: 64 * size].reshape(-1, size, *ids.shape[1:])
            counted = np.stack([count_topk(window.astype(np.int64), experts) for window in cut])
            yield from casts("load", f"windows of {size} tokens", counted)
    for load in loads[:1]:
        yield from of_layouts(load if load.ndim == 3 else load[None])


def casts(kind: str, how: str, array: Array, kinds: str = "i2 i4 i8 u2 f4 f8") -> Iterator[Case]:
    """The array in every dtype that holds it."""
    for dtype in kinds.split():
        cast = array.astype(dtype)
        if (cast == array).all():
            yield Case(kind, how, cast)


def of_load(load: Array) -> Iterator[Case]:
    yield from casts("load", "whole", load)
    yield Case("load", "one window", load[0])
    yield Case("load", "one layer", load[:, :1])
    yield Case("load", "every second layer", load[:, ::2])
    yield Case("load", "last windows", load[len(load) // 2 :])
    yield Case("load", "scaled", load * 0.37)
    yield Case("load", "windows as one", load.sum(axis=0))
    for order in ((0, 2, 1), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        yield Case("load, turned", f"axes {order}", load.transpose(order))
    if len(load) > 1:
        yield Case("load, turned", "axes (1, 0, 2)", load.transpose(1, 0, 2))
    yield Case("load, turned", "one window, transposed", load[0].T)
    if len(load) > 1:
        yield Case("load, joined", "windows and layers as one axis", load.reshape(-1, load.shape[2]))
    yield Case("load, joined", "layers and experts as one axis", load.reshape(len(load), -1))
    yield Case("load, joined", "one row", load.reshape(1, 1, -1))
    yield Case("load, cut", "half of the experts", load[:, :, : load.shape[2] // 2])
    yield Case("load, cut", "layers beside each other", np.concatenate([load[:, :-1], load[:, 1:]], axis=2)[:, ::2, 1:])
    share = load / np.maximum(load.sum(axis=2, keepdims=True), 1)
    yield Case("shares", "of a row", share)
    yield Case("shares", "per token", share * 8)
    if len(load) >= 3:
        yield Case("load, added up", "from window to window", load.cumsum(axis=0))
        yield Case("load, added up", "three windows", load.cumsum(axis=0)[-3:])
    for axis, name in enumerate(("window", "layer", "expert")):
        if load.shape[axis] > 3:
            total = load.sum(axis=axis, keepdims=True)
            yield Case("load, with totals", f"as the last {name}", np.concatenate([load, total], axis=axis))
    yield Case("mask", "above the mean", (load > load.mean()).astype(np.int64))
    yield Case("shares", "logarithms", np.log(share + 1e-9))
    names = np.indices(load.shape).reshape(3, -1)
    yield Case("table", "window, layer, expert, tokens", np.vstack([names, load.reshape(1, -1)]).T)
    wide = load.reshape(-1, load.shape[2])
    layer = np.tile(np.arange(load.shape[1]), len(load))
    yield Case("table", "experts as columns, with the layer", np.column_stack([layer, wide]))


def of_tokens(ids: Array) -> Iterator[Case]:
    wide = ids.astype(np.int64)
    rng = np.random.default_rng(0)
    yield from casts("top-k ids", "whole", ids, "i2 i4 i8 u1 f4 f8")
    for count in (4, 16, 64, 256):
        yield Case("top-k ids", f"{count} tokens", ids[:count])
        yield Case("top-k ids", f"{count} tokens of two layers", ids[:count, :2])
    yield Case("top-k ids", "one layer", ids[:, 0])
    yield Case("top-k ids", "64 tokens of one layer", ids[:64, 0])
    yield Case("top-k ids", "first two of k", ids[:, :, :2])
    yield Case("top-k ids", "first of k", ids[:, :, :1])
    yield Case("top-k ids", "sorted", np.sort(ids, axis=2))
    padded = wide.copy()
    padded[-len(ids) // 4 :] = -1
    yield Case("top-k ids", "padded", padded)
    yield Case("top-k ids", "layers first", ids.transpose(1, 0, 2))
    yield Case("top-k ids, turned", "layers last", ids.transpose(0, 2, 1))
    yield Case("top-k ids, turned", "tokens last", ids.transpose(1, 2, 0))
    yield Case("top-k ids, turned", "k first", ids.transpose(2, 0, 1))
    pairs = wide.reshape(len(ids) // 2, 2, *ids.shape[1:]).transpose(0, 2, 1, 3)
    yield Case("top-k ids, joined", "two tokens a row", pairs.reshape(*pairs.shape[:2], -1))
    yield Case("top-k ids, joined", "layers a row", ids.reshape(len(ids), -1))
    yield Case("top-k ids, joined", "one column", ids[:, :, 0])
    yield Case("top-k weights", "of each token", np.sort(rng.dirichlet(np.ones(ids.shape[2]), ids.shape[:2])))
    yield Case("router logits", "of each token", rng.normal(size=(64, ids.shape[1], int(ids.max()) + 1)))


def of_layouts(load: Array) -> Iterator[Case]:
    layers, experts = load.shape[1:]
    for more in (0, experts // 8, experts):
        slots = experts + more
        rng = np.random.default_rng(more)
        rows = [rng.permutation(np.r_[:experts, rng.integers(0, experts, more)]) for _ in range(layers)]
        layout = eplb.ExpertLayout(np.stack(rows), experts, topology=eplb.Topology(1))
        trivial = eplb.ExpertLayout.trivial(layers, experts, num_slots=slots, topology=eplb.Topology(1))
        for how, each in (("permuted", layout), ("trivial", trivial)):
            p2l = each.physical_to_logical_map
            yield from casts("map", f"{how}, {more} redundant", p2l, "i2 i8 u2 f8")
            yield Case("map, turned", f"{how}, {more} redundant", p2l.T)
            yield Case("other table", f"{how}, slots of experts", each.logical_to_physical_map)
            yield Case("other table", f"{how}, first slots of experts", each.logical_to_physical_map[:, :, 0])
            yield Case("other table", f"{how}, replica counts", each.replica_count)


if __name__ == "__main__":
    raise SystemExit(main())
