"""Runs programs that are not trusted, in processes that can compute and nothing else."""
