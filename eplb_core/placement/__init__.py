"""Who gets replicas, and which rank holds what."""
