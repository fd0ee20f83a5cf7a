"""Conversion between Hugging Face and megatron-core checkpoints, streamed."""
