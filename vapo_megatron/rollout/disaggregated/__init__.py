"""Sampling in processes of their own, for trainers in others."""
