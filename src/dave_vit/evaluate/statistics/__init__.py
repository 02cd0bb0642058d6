"""Rows of results, and what is computed from them."""
