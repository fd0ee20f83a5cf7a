"""The names that metrics are broken down by: of each problem's verifier, and of its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from vapo_megatron.data.problems import Problem

T = TypeVar("T")

Labels = Mapping[str, Mapping[int, str]]
"""Kind, one of config.metrics.KINDS -> Prompt.index -> name. Has only kinds with several names."""


def labels_of(problems: Iterable[tuple[int, Problem]], default_verifier: str) -> Labels:
    """Name each problem's verifier and source, where there is more than one of them.

    Args:
        problems: with their Prompt.index.
        default_verifier: the name of the verifier that judges problems which name none.
    """
    found: dict[str, dict[int, str]] = {"verifier": {}, "source": {}}
    for index, problem in problems:
        found["verifier"][index] = problem.verifier or default_verifier
        if problem.source is not None:
            found["source"][index] = problem.source
    return {kind: names for kind, names in found.items() if len(set(names.values())) > 1}


def by_label(values: Mapping[int, T], labels: Labels) -> dict[tuple[str, str], list[T]]:
    """Sort one value per problem by (kind, name).

    Args:
        values: by Prompt.index.
        labels: of all these problems.
    """
    found: dict[tuple[str, str], list[T]] = {}
    for kind, names in labels.items():
        for name in sorted(set(names.values())):
            found[kind, name] = [value for index, value in values.items() if names[index] == name]
    return found
