"""Files: this library's own layouts and traces, and those that engines write and read."""
