"""Stream a safetensors checkpoint into all slots that the layout names.

All headers are read first and the whole load is planned: a missing expert, a wrong shape, a truncated shard or an
unknown name raises before a byte of a slot changes. Then shards are read one after the other, front to back; one
expert's part of one tensor is in memory at a time.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eplb_core._arrays import BoolArray, check_names, read_only, to_list
from eplb_core._extras import needed
from eplb_core._text import plain, quoted
from eplb_core.errors import FileFormatError
from eplb_core.files.reading import check_path, open_regular, read_json, reading
from eplb_core.loading.checkpoint.plan import Copy, Header, LoadPlan
from eplb_core.loading.checkpoint.templates import CheckpointTemplate, check_naming
from eplb_core.loading.resolver import SlotResolver
from eplb_core.loading.store import ExpertStore

MAPPED_BYTES = 128 << 20
"""A shard is opened anew after so many bytes, since pages of an open file count as the process's memory."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadReport:
    """What `load_checkpoint` wrote."""

    written: BoolArray
    """Slots that hold their expert, every tensor of it; bools `[layers, S]` in order of the stores, read-only. All
    ranks' side by side, `np.concatenate(written_of_ranks, axis=1)`, are `verify_weights(loaded=)`."""
    num_tensors: int
    """Checkpoint tensors that were read, whole or in part."""
    num_bytes: int
    """Bytes that were read from them."""


def load_checkpoint(
    files: str | Path | Iterable[str | Path],
    stores: Sequence[ExpertStore],
    resolver: SlotResolver,
    *,
    template: str | CheckpointTemplate,
    rename: Mapping[str, str] | None = None,
    derived: Iterable[str] = (),
    ignore: Iterable[str] = (),
    shared_stores: Sequence[ExpertStore] | None = None,
) -> LoadReport:
    """Fill every slot of this rank with the expert that the resolver's layout names, replicas included.

    Written in place: tensors keep their addresses. To update weights after a rebalance, load again with
    `resolver.with_layout(migrator.layout)`. Experts that this rank does not hold are not read.

    Args:
        files: A folder (with or without `model.safetensors.index.json`), a file, or files.
        stores: One for each of `resolver.layers`, in that order; draft layers, which come last, may be left out.
        resolver: Says which slots.
        template: How the checkpoint names things: a family in `TEMPLATES`, or a template of your own.
        rename: From the template's names (`w13`, `w2_scale`) to the stores'; others stay.
        derived: Names in the stores that no checkpoint has, since the engine computes them.
        ignore: Names, or patterns, of expert tensors in the checkpoint that the stores do not keep.
        shared_stores: For each of `stores`, the F rows of fused shared experts; without it they are not loaded.

    Returns:
        Report: which slots were written.

    Raises:
        CheckpointError: Before anything is written: an expert or one of its tensors is missing, is there twice, has
            another shape or dtype, or a name is unknown. It lists the slots that nothing would write.
        FileFormatError: A shard is truncated, missing or no safetensors file; nothing is written.
        ImportError: safetensors is not installed: `pip install eplb-core[files]`.

    Cost:
        One read of the local experts' bytes; host memory for one expert's part of one tensor, beside at most 128 MiB of
        the file's pages, which the system may take back.

    Threads:
        One. While it runs, slots hold parts of two versions: nobody may read or move them.
    """
    plan = LoadPlan(
        to_list(stores, "stores"),
        resolver,
        check_naming(template, rename, ignore),
        frozenset(check_names(derived, "derived")),
        None if shared_stores is None else to_list(shared_stores, "shared_stores"),
    )
    headers = read_headers(files)
    for name, header in headers.items():
        plan.add(name, header)
    plan.check_complete()
    return _run(plan, headers)


def _run(plan: LoadPlan, headers: Mapping[str, Header]) -> LoadReport:
    by_file: dict[Path, set[str]] = {}
    for name, copies in plan.copies.items():
        if copies:
            by_file.setdefault(headers[name].path, set()).add(name)
    num_bytes = 0
    for path, names in by_file.items():
        with _opened(path) as file:
            todo = deque((name, copy) for name in file.offset_keys() if name in names for copy in plan.copies[name])
        while todo:
            with _opened(path) as file:
                num_bytes += _read_some(file, todo, plan)
    return LoadReport(read_only(plan.written()), sum(map(len, by_file.values())), num_bytes)


def _read_some(file: Any, todo: deque[tuple[str, Copy]], plan: LoadPlan) -> int:
    """Make copies until enough of the file is mapped; closing it gives those pages back."""
    num_bytes = 0
    while todo and num_bytes < MAPPED_BYTES:
        name, copy = todo.popleft()
        source = file.get_tensor(name) if copy.row is None else file.get_slice(name)[copy.row]
        num_bytes += source.nbytes
        for target in copy.targets:
            target.copy_(source.reshape(target.shape))
        plan.done(copy)
    return num_bytes


# ---- files -----------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    safetensors = needed("safetensors", "files", "reading checkpoints")
    try:
        open_regular(path, sys.maxsize).close()  # a pipe would be waited for
        file = safetensors.safe_open(path, framework="pt", device="cpu")
    except FileFormatError:
        raise
    except (safetensors.SafetensorError, OSError, ValueError) as error:  # no file can have such a name
        what = f"shard {plain(path.name)} is no whole safetensors file in {plain(str(path.parent))}"
        raise FileFormatError(f"{what}: {plain(str(error))}; fetch it again", path=str(path)) from error
    with file:
        yield file


def _shards(files: str | Path | Iterable[str | Path]) -> list[Path]:
    """The checkpoint's files, in order of name; those that an index lists must all be there."""
    if not isinstance(files, (str, Path)):
        return [Path(check_path(file, "files")) for file in to_list(files, "files")]
    folder = Path(files)
    if not folder.is_dir():
        return [folder]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise FileFormatError(f"{folder} has no *.safetensors file", path=str(folder))
        return found
    with reading(index, "an index with the `weight_map` of shards", "fetch it again"):
        names = sorted({str(name) for name in read_json(index)["weight_map"].values()})
    for name in names:  # what lies elsewhere belongs to somebody else; a cache's links within the folder do not
        if Path(name).is_absolute() or ".." in Path(name).parts:
            what = f"{plain(index.name)} names {quoted(name, 80)}, which is not in {plain(str(folder))}"
            raise FileFormatError(f"{what}; fetch it again, or pass the files themselves", path=str(index))
    return [folder / name for name in names]


def read_headers(files: str | Path | Iterable[str | Path]) -> dict[str, Header]:
    """What the shards say of each tensor; the arguments are those of `load_checkpoint`."""
    headers: dict[str, Header] = {}
    for path in _shards(files):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                if name in headers:
                    raise FileFormatError(
                        f"shards {plain(headers[name].path.name)} and {plain(path.name)} both have {quoted(name)}",
                        path=str(path),
                    )
                piece = file.get_slice(name)
                headers[name] = Header(path, tuple(piece.get_shape()), piece.get_dtype())
    return headers
