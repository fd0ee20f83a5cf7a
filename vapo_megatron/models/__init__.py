"""Qwen2 models on megatron-core. Only hf_config.py is free of torch."""
