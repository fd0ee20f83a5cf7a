"""Qwen2 models on megatron-core."""

import vapo_megatron.parallel  # noqa: F401  (prepares megatron-core before any module here imports it)
