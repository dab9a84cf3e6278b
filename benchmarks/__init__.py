"""One file per benchmark: `python -m benchmarks` runs all, `python -m benchmarks.placement --help` one."""
