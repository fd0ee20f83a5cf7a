"""The trainer's weights with their adapters (LoRA) added, made as a sync or a check reads them.

A whole shard is merged at a time, so that however it is cut into slices these have the same bits.
Memory: the shards of about a layer.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

_KEPT = 8
"""Shards: a layer has four with adapters, and a step of a sync may end within one."""


class MergedWeights(Mapping[tuple[int, str], Tensor]):
    """Weights by (chunk, name), as transfer.py and verify.py read them, while none changes."""

    def __init__(
        self, weights: Mapping[tuple[int, str], Tensor], adapters: Mapping[tuple[int, str], Any]
    ) -> None:
        """Merge nothing yet; adapters: models.adapters.Adapter of some of the weights."""
        self._weights, self._adapters = weights, adapters
        self._merged: collections.OrderedDict[tuple[int, str], Tensor] = collections.OrderedDict()

    def __getitem__(self, key: tuple[int, str]) -> Tensor:
        if key not in self._adapters:
            return self._weights[key]
        if key not in self._merged:
            self._merged[key] = self._adapters[key].merged(self._weights[key].detach())
            if len(self._merged) > _KEPT:
                self._merged.popitem(last=False)
        self._merged.move_to_end(key)
        return self._merged[key]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
