"""Replays of captured eager inputs under compute-sanitizer."""
