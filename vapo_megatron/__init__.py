"""VAPO (arXiv 2504.05118) on megatron-core actors and critics, sampling with vLLM in process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vapo_megatron.config import VapoConfig, load_config
    from vapo_megatron.training.loop import VapoTrainer

__version__ = "0.1.0"
__all__ = ["VapoConfig", "VapoTrainer", "load_config"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: the trainer needs torch, the configuration not."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = "training.loop" if name == "VapoTrainer" else "config"
    return getattr(importlib.import_module(f"{__name__}.{room}"), name)
