"""Partial rollouts: groups that go on over several steps, and what a checkpoint has of them."""
