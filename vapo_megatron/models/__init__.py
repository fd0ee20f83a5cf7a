"""Qwen2, Qwen3 and Llama on megatron-core. Only hf_config.py is free of torch."""
