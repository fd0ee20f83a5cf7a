"""Concise reasoning by a second phase."""
