"""Partial rollouts: groups sampled over several steps, and their state in checkpoints."""
