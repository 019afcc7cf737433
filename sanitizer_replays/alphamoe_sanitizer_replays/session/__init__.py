"""A sanitize session: which replays it makes, and how it makes them."""
