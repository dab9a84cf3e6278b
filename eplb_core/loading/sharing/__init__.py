"""Weights that one process holds for others."""
