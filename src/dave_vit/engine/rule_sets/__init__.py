"""Rule sets: which rule each torch function meets."""
