"""What the plug-ins can do with the engines that are installed here: `python -m eplb_core.adapters.check`.

Reads the engines' files and imports none of them, so that it needs no GPU and takes seconds. Prints a line for each
part: it works, is left to the engine (and what does not fit), or the engine has nothing of that kind. The exit status
is 0 where all parts of some engine work, else 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import NamedTuple

from eplb_core.adapters import hooking, source
from eplb_core.adapters.sglang import plugin as sglang
from eplb_core.adapters.vllm import plugin as vllm


class Line(NamedTuple):
    """What is said of one part of a plug-in."""

    part: str
    status: str
    """"works", "left to the engine", or "not there"."""
    why: str
    """What does not fit, or what the part does without."""


def parts_of(engine: str) -> Iterator[Line]:
    """Yield what each part of the plug-in for "vllm" or "sglang" can do with the engine that is installed here."""
    plugin = vllm if engine == "vllm" else sglang
    for part in plugin.PARTS:
        found = list(plugin.troubles(part))
        missing = [trouble for hook, trouble in found if hook.needed and trouble]
        optional = [trouble for hook, trouble in found if not hook.needed and trouble]
        if found[0][1].endswith(hooking.NO_SUCH):  # what the part is about
            yield Line(part, "not there", missing[0])
        elif missing:
            yield Line(part, "left to the engine", missing[0])
        else:
            yield Line(part, "works", f"without one function: {'; '.join(optional)}" if optional else "")


def report() -> Iterator[str]:
    """Yield the lines of the table for all engines that are installed here."""
    for engine in ("vllm", "sglang"):
        if source.file_of(engine) == "":
            yield f"{engine}: not installed here"
            continue
        yield f"{engine} {_version(engine)} (the plug-in was written for {WRITTEN_FOR[engine]}; EPLB_CORE={engine})"
        if source.file_of(LOADERS[engine]) == "":
            yield f"  not active: {NO_LOADER[engine]}"
            continue
        for line in parts_of(engine):
            yield f"  {line.part:<10} {line.status}{f': {line.why}' if line.why else ''}"


def _version(engine: str) -> str:
    try:
        return metadata.version(engine)
    except metadata.PackageNotFoundError:
        return "of unknown version"


WRITTEN_FOR = {"vllm": "0.33.0", "sglang": "0.5.23"}
LOADERS = {"vllm": "vllm.plugins", "sglang": "sglang.srt.plugins.hook_registry"}
NO_LOADER = {"vllm": "this vLLM has no loader of plug-ins (vllm.plugins)", "sglang": sglang.NO_LOADER}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; say by the exit status whether some engine's parts all work."""
    del argv
    for line in report():
        print(line)
    whole = [
        all(line.status == "works" for line in parts_of(engine))
        for engine, loader in LOADERS.items()
        if source.file_of(engine) and source.file_of(loader)
    ]
    return 0 if any(whole) else 1


if __name__ == "__main__":
    sys.exit(main())
