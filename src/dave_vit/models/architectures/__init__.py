"""Architectures of the embedded models."""
