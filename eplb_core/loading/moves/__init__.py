"""Experts that change slots: pulled from peers, staged, installed on all ranks in one pass."""
