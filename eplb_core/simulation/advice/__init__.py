"""From a recording, a GPU and a model's config to one recommendation."""
