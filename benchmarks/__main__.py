"""All benchmarks, and one screen of what they found.

    python -m benchmarks --out FOLDER --loads R1.npz --peers-dir .peers --peer eplb.py
    python -m benchmarks --table            # runs nothing: docs/claims.md and README.md from benchmarks/results

A benchmark is a module here with `main(argv)` that takes `--quick` and `--json PATH`. The tables go to
FOLDER/NAME.md, the records to FOLDER/NAME.json; the lines under `summary` in the record make the screen. In the end
FOLDER/claims.md has every claim beside its peer. Options in a module's `PEER_OPTIONS` are handed on to it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import benchmarks
from benchmarks import claims

HANDED_ON = ("--loads", "--peers-dir", "--peer")
HELPERS = {
    "__main__",
    "claims",
    "engine_ranks",
    "engine_versions",
    "full_grid",
    "measure",
    "moving_gpu_ranks",
    "peers",
    "ranks",
    "real_engines",
    "real_probe",
    "traces",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small inputs: does it run?")
    parser.add_argument("--out", type=Path, default=Path("benchmark_results"))
    parser.add_argument("--table", action="store_true", help="run nothing: write claims.md and README.md from records")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    for option in HANDED_ON:
        parser.add_argument(option)
    options = parser.parse_args(argv)
    if options.table:
        records = claims.found(claims.RESULTS)
        claims.PAGE.write_text(claims.page(records, where="../benchmarks/results"))
        claims.README.write_text(claims.readme(claims.README.read_text(), records))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, module in found(options.only):
        record = options.out / f"{name}.json"
        arguments = ["--json", str(record), *(["--quick"] if options.quick else [])]
        for option in getattr(module, "PEER_OPTIONS", ()):
            value = getattr(options, option[2:].replace("-", "_"))
            arguments += [] if value is None else [option, value]
        start = time.perf_counter()
        with (options.out / f"{name}.md").open("w") as report, contextlib.redirect_stdout(report):
            try:
                status = module.main(arguments)
            except Exception as error:  # the others still run
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                status = 1
        if status:
            failed.append(name)
            continue
        print(f"\n{name} ({time.perf_counter() - start:.0f} s; {options.out / name}.md)")
        for line in json.loads(record.read_text()).get("summary", []):
            print(f"  {line}")
    page = options.out / "claims.md"
    page.write_text(claims.page(claims.found(options.out), where="."))
    print(f"\nevery claim beside its peer: {page}")
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def found(only: Sequence[str] | None) -> Iterator[tuple[str, ModuleType]]:
    """Name and module of each benchmark, in order of names."""
    names = sorted({module.name for module in pkgutil.iter_modules(benchmarks.__path__)} - HELPERS)
    for name in only or names:
        if name not in names:
            raise SystemExit(f"`--only` (={name}) must be one of {', '.join(names)}")
        yield name, importlib.import_module(f"benchmarks.{name}")


if __name__ == "__main__":
    raise SystemExit(main())
