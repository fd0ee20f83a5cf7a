"""The buffers in which megatron-core accumulates and reduces gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def gradient_buffers(chunks: Sequence[Any]) -> Iterator[Any]:
    """Yield every gradient buffer of DDP-wrapped chunks.

    megatron-core keeps experts' gradients in buffers of their own, because other ranks hold the
    same experts than hold the same dense layers: data_parallel_group says which ranks reduce one.
    """
    for chunk in chunks:
        yield from chunk.buffers
        yield from chunk.expert_parallel_buffers
