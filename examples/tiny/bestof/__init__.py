"""Pairwise-RL on the tiny task: what the reference of a pairwise judge is worth."""
