"""Checkpoints of a run: written while it goes on, found and loaded when it resumes."""
