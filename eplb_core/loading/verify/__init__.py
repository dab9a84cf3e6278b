"""Fingerprints of weights, and whether they match the layout."""
