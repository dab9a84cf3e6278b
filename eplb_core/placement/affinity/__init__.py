"""Which experts are used together, and layouts that keep them on one node."""
