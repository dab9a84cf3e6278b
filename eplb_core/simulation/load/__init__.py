"""Loads to replay: generated ones, and sources of windows."""
