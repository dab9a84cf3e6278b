"""Which parts of the plug-ins work with which versions of vLLM and SGLang: the table of docs/engines.md.

    python -m benchmarks.engine_versions --json engine_versions.json      # downloads 9 GB, keeps none of it

Looks into the wheel of each version as `python -m eplb_core.adapters.check` looks at the engine that is installed:
files are read, and nothing of them is imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import measure

OLDEST = {"vllm": "0.20.0", "sglang": "0.5.15"}
SHORT = {"works": "works", "left to the engine": "engine's", "not there": "-"}
CHILD = """
import json
from eplb_core.adapters import check, source
engine = {engine!r}
loader = source.file_of(check.LOADERS[engine]) != ""
print(json.dumps({{"loader": loader, "parts": [line._asdict() for line in check.parts_of(engine)] if loader else []}}))
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.parser("engine_versions", __doc__, quick="the newest version of each engine")
    options = parser.parse_args(argv)
    rows = []
    for engine, oldest in OLDEST.items():
        for version in versions(engine, oldest)[: 1 if options.quick else None]:
            rows.append({"engine": engine, "version": version, **look_into(engine, version)})
            print(f"{engine} {version}", file=sys.stderr)
    for engine in OLDEST:
        print(table([row for row in rows if row["engine"] == engine]), "\n")
    whole = [row for row in rows if row["loader"] and all(part["status"] == "works" for part in row["parts"])]
    summary = [f"all parts of the plug-ins work in {len(whole)} of {len(rows)} versions of vLLM and SGLang"]
    print(*summary, sep="\n")
    measure.write_json(options.json, {"summary": summary, "rows": rows})
    return 0


def versions(engine: str, oldest: str) -> list[str]:
    """Those that the package registry has, the newest first, down to `oldest`."""
    command = [sys.executable, "-m", "pip", "index", "versions", engine, "--disable-pip-version-check"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    listed = re.search(r"versions: (.*)", said)
    found = listed[1].split(", ") if listed else []
    return found[: found.index(oldest) + 1]


def look_into(engine: str, version: str) -> dict[str, Any]:
    """What `check` says of a version's files."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        subprocess.run([*command, "--dest", folder, f"{engine}=={version}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            named = [name for name in archive.namelist() if name.startswith(f"{engine}/") and name.endswith(".py")]
            archive.extractall(Path(folder, "site"), named)
        path = os.pathsep.join([str(Path(folder, "site")), str(measure.ROOT)])
        found: dict[str, Any] = measure.json_of("-c", CHILD.format(engine=engine), PYTHONPATH=path)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Versions that are alike in one row, and what each part says."""
    parts = [part["part"] for part in rows[0]["parts"]]

    def said(row: dict[str, Any]) -> list[str]:
        return [SHORT[part["status"]] + "*" * bool(part["why"] and part["status"] == "works") for part in row["parts"]]

    lines = []
    for cells, alike in groupby(rows, said):
        named = [row["version"] for row in alike]
        span = named[0] if len(named) == 1 else f"{named[-1]} - {named[0]}"
        lines.append([span, *(cells or ["-"] * len(parts))])
    return measure.table([rows[0]["engine"], *parts], lines)


if __name__ == "__main__":
    raise SystemExit(main())
