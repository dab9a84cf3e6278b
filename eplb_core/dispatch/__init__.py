"""Which replica a token goes to."""
