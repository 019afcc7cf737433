"""Replay plug-ins that come with this package."""
