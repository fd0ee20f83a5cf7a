"""Modules of megatron-core from a config.json: Qwen2, Qwen3 with and without experts, and Llama."""
