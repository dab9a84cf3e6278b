"""Weights that one process keeps in memory and engines map: the host, the attachment, the shared memory."""
