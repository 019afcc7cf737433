"""Render what the passes computed: for a terminal and as JSON."""
