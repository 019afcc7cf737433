"""Replay plug-ins: what one is, those that come with this package, and what they share."""
