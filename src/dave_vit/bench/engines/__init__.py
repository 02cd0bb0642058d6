"""Engines: who computes the tasks of a run."""
