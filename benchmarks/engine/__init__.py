"""A reference engine: where each call of this library goes, and a proof that the parts work together under traffic."""
