"""Positive controls: planted faults that a tool must catch before its clean results count."""
