"""Architectures that no library carries."""
