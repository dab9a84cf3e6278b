"""Engines, one folder or file each: names, shapes and hooks, and no rule of their own."""
