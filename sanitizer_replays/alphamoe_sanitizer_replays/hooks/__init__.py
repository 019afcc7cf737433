"""Captures in processes that are not ours: switched on by environment variables, off without them."""
