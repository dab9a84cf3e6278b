"""A reference engine: where each call of this library goes, and a proof that the parts work together under traffic.

    python -m benchmarks.engine                    # figures: off, synchronous, asynchronous; skewed load; overhead
    python -m benchmarks.engine --soak 600 --ranks 8
    python -m benchmarks.engine --device cuda:0 --preset h200

docs/guide.md walks through it. The files by role: model, weights, exchange, forward, engine (the library's calls),
requests, oracle, cluster (processes), drive, shared (weight hosts), soak.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m benchmarks.engine`."""
    from benchmarks.engine.__main__ import main as run

    return run(argv)
