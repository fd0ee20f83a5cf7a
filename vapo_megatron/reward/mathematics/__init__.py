"""Compares a final answer with a ground truth, both formulas; runs in a worker process."""
