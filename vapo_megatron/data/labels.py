"""The names that metrics are broken down by: of each problem's verifier, and of its source."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from vapo_megatron.data.problems import Problem

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Labels:
    """Names by kind, one of config.metrics.KINDS, and by Prompt.index."""

    of: Mapping[str, Mapping[int, str]]
    """Every problem has a verifier; sources have those of data.sources."""
    several: Mapping[str, Sequence[str]]
    """Kind -> its names in order, only where there are two or more: what metrics go by."""

    def by_name(self, kind: str, values: Mapping[int, T]) -> dict[str, list[T]]:
        """Sort one value per problem, by Prompt.index, by its name in one of `several`."""
        found: dict[str, list[T]] = {name: [] for name in self.several[kind]}
        for index, value in values.items():
            found[self.of[kind][index]].append(value)
        return found


def labels_of(problems: Iterable[tuple[int, Problem]], default_verifier: str) -> Labels:
    """Name each problem's verifier and source.

    Args:
        problems: with their Prompt.index.
        default_verifier: the name of the verifier that judges problems which name none.
    """
    of: dict[str, dict[int, str]] = {"verifier": {}, "source": {}}
    for index, problem in problems:
        of["verifier"][index] = problem.verifier or default_verifier
        if problem.source is not None:
            of["source"][index] = problem.source
    names = {kind: sorted(set(found.values())) for kind, found in of.items()}
    return Labels(of, {kind: found for kind, found in names.items() if len(found) > 1})


def count_rows(labels: Labels, path: str, section: str) -> list[str]:
    """Return how many rows each verifier judges, a line for each source, or for the file at path.

    section is the configuration's that has the sources.
    """
    counts: dict[str, collections.Counter[str]] = {}
    for index, verifier in labels.of["verifier"].items():
        source = labels.of["source"].get(index)
        where = path if source is None else f"{section}.sources.{source}"
        counts.setdefault(where, collections.Counter())[verifier] += 1
    return [
        f"{where}, {sum(found.values())} rows: judged by "
        + ", ".join(f"{name} ({count})" for name, count in found.most_common())
        for where, found in counts.items()
    ]


NO_LABELS = labels_of((), "")
