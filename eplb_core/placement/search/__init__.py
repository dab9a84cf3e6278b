"""A layer improved from the layout that is live: exchanges, gifts, and what their transfers cost."""
