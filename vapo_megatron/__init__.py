"""VAPO (arXiv 2504.05118) on megatron-core actors and critics, with vLLM rollouts in the same processes."""

__version__ = "0.1.0"
