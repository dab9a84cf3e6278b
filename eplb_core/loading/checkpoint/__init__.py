"""Weights from a checkpoint into the slots of a rank."""
