"""The command line: `eplb` or `python -m eplb_core`."""
