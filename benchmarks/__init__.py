"""One file a claim: `python -m benchmarks` runs all, `python -m benchmarks.placement --help` one."""
