"""Retro-Search on the tiny task: fine-tuning on a model's own right traces, and on revised ones."""
