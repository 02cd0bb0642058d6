"""Rules: for one torch function each, the same value with another derivative."""
