"""One file an engine: names, shapes, files and hooks; nothing else."""
