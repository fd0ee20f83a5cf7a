"""Weights between Hugging Face, Megatron and vLLM, by one name table."""
