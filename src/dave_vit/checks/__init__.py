"""Checks of models: `dave doctor`, and the table of checked architectures."""
