"""Helpers without knowledge of models: registry, option schema, atomic files, environment, precision."""
