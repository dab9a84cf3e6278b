"""Several soaks at once, on machines with the cores for it: each a program of its own, with a seed of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def soaks_at_once(
    number: int, ranks: int, seconds: float, *, seed: int, shared: bool, policy: str = "auto"
) -> dict[str, Any]:
    """What soaks with the seeds from `seed` on saw in all, and the seeds of those that failed."""
    seeds = range(seed, seed + number)
    with tempfile.TemporaryDirectory(prefix="eplb-soaks-") as folder:
        files = [Path(folder) / f"{one}.json" for one in seeds]
        command = [sys.executable, "-m", "benchmarks.engine", "--soak", str(seconds), "--ranks", str(ranks)]
        command += ["--policy", policy]
        command += ["--shared"] if shared else []
        running = [
            subprocess.Popen([*command, "--seed", str(one), "--json", str(file)])
            for one, file in zip(seeds, files, strict=True)
        ]
        codes = [one.wait() for one in running]
        reports = [json.loads(file.read_text())["soak"] for file in files if file.exists()]
    failed = [one for one, code in zip(seeds, codes, strict=True) if code]
    return {"soaks": number, "ranks": ranks, "seeds": list(seeds), "failed": failed, **in_all(reports)}


def in_all(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums; of what is the worst of a soak, the worst."""
    total: dict[str, Any] = {}
    for report in reports:
        for name, value in report.items():
            if isinstance(value, dict):
                total[name] = dict(Counter(total.get(name, {})) + Counter(value))
            elif name.startswith("worst"):
                total[name] = max(total.get(name, 0.0), value)
            else:
                total[name] = total.get(name, 0) + value
    return total
