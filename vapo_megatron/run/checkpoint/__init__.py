"""Checkpoints of a run: written during the run, found and loaded on resume."""
