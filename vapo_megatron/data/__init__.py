"""Batches, problems, packing, atomic storage."""
