"""A layer solved from nothing: who gets replicas, which rank holds what."""
