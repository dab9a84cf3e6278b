"""Weights in slots: what fills them, what moves them while an engine serves, and how engines share them.

To fill: `resolver` (rows of an expert), `store` (tensors by slot), `checkpoint`, `verify` (do bytes match the layout?).
To move: `pull_plan`, `transport` and `transports`, `install`, `agreement` between ranks, `moves` (all of it together).
To share: `record` (one layout for several engines), `sharing` (one memory for them). `cuda` has the driver's calls.
"""
