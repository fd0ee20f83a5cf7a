"""Qwen2, Qwen3 and Llama on megatron-core. Only hf_config.py and known.py are free of torch."""
