"""VAPO (arXiv 2504.05118) on megatron-core actors and critics, sampling with vLLM in process."""

__version__ = "0.1.0"
