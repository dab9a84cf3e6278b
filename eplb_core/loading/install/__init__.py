"""Staged bytes into live slots, in one launch."""
