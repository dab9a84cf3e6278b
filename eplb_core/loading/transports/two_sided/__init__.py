"""Reads over torch.distributed, where both sides take part."""
