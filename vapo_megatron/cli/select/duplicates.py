"""Near-duplicates among texts: the Jaccard similarity of their sets of 5-character pieces.

Texts are compared in Unicode's form NFKC, case-folded, with single spaces and without published
instructions (cli/prepare/columns.py). A piece that more than a tenth of the texts (and more than
20) share is a template's, and is not counted.

The result is exact, and does not compare all pairs: two similar texts share some of the rarest
pieces of each (prefix filtering, Chaudhuri et al. 2006; Bayardo et al. 2007), so that an inverted
index of these few pieces finds all candidates.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vapo_megatron.cli.prepare.columns import strip_instructions
from vapo_megatron.data.order import mix

PIECE = 5
"""Characters."""
COMMON_SHARE, COMMON_LEAST = 0.1, 20
"""A piece in more texts than this share, and than this number, is not counted."""

SHARED = 8
"""Of the rarest pieces of two similar texts so many are the same, where they have as many."""

Pieces = NDArray[np.int64]
"""A text's pieces by the rank of their frequency, ascending: the rarest first."""


class Duplicate(NamedTuple):
    """A text that repeats an earlier one."""

    of: int
    """Index of the earlier text, which is no duplicate itself."""
    similarity: float


def near_duplicates(texts: Sequence[str], similarity: float) -> dict[int, Duplicate]:
    """Return the texts that are at least so similar to an earlier one that is kept.

    Texts are decided in their order: the first of similar ones is kept, and only kept ones make
    others duplicates. Of several kept ones the most similar is named, of equally similar the first.

    Args:
        texts: any number.
        similarity: above 0, at most 1, which only texts with the same pieces reach.
    """
    normalized = [_normalized(text) for text in texts]
    pieces = _ranked([_hashed(text) for text in normalized])
    sizes = np.array([len(own) for own in pieces])
    # Every similar text has at least this many of a text's pieces, so of two similar texts' common
    # pieces the rarest SHARED are among the first ones of each.
    least = np.ceil(similarity * sizes - 1e-9).astype(np.int64)
    rarest = [own[: len(own) - n + SHARED] for own, n in zip(pieces, least)]
    texts_with = _index(rarest)
    first: dict[str, int] = {}
    is_kept = np.zeros(len(texts), np.bool_)
    found: dict[int, Duplicate] = {}
    for i, text in enumerate(normalized):
        if text in first:
            found[i] = Duplicate(first[text], 1.0)
            continue
        others = np.concatenate([np.zeros(0, np.int64), *map(texts_with, rarest[i])])
        others, shared = np.unique(others[others < i], return_counts=True)
        is_candidate = is_kept[others] & (sizes[others] >= least[i]) & (sizes[i] >= least[others])
        is_candidate &= shared >= np.minimum(SHARED, np.maximum(least[i], least[others]))
        compared = [_compared(pieces[i], pieces[j], j) for j in others[is_candidate].tolist()]
        best = max(compared, key=_by_likeness, default=None)
        if best is not None and best.similarity >= similarity:
            found[i] = best
        else:
            first[text], is_kept[i] = i, True
    return found


def _normalized(text: str) -> str:
    folded = unicodedata.normalize("NFKC", strip_instructions(text)).casefold()
    return " ".join(folded.split())


def _hashed(text: str) -> NDArray[np.uint64]:
    """Return the distinct hashes of a text's pieces, ascending; a short text is one piece."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    codes = np.pad(codes, (0, max(0, PIECE - len(codes))))
    hashes = np.zeros(len(codes) - PIECE + 1, np.uint64)
    for column in np.lib.stride_tricks.sliding_window_view(codes, PIECE).T:
        hashes = mix(hashes ^ column)
    return np.unique(hashes)


def _ranked(hashed: Sequence[NDArray[np.uint64]]) -> list[Pieces]:
    """Replace hashes by ranks, the rarest first, and leave out those that too many texts have."""
    if not hashed:
        return []
    distinct, place, counts = np.unique(
        np.concatenate(hashed), return_inverse=True, return_counts=True
    )
    rank = np.empty(len(distinct), np.int64)
    rank[np.argsort(counts, kind="stable")] = np.arange(len(distinct))
    common = max(COMMON_LEAST, COMMON_SHARE * len(hashed))
    ranks = np.where(counts > common, -1, rank)[place]
    ends = np.cumsum([len(own) for own in hashed])[:-1]
    return [np.sort(own[own >= 0]) for own in np.split(ranks, ends)]


def _index(rarest: Sequence[Pieces]) -> Callable[[int], NDArray[np.int64]]:
    """Return a function from a piece to the texts, ascending, that have it among these."""
    owners = np.repeat(np.arange(len(rarest)), [len(own) for own in rarest])
    ranks = np.concatenate([np.zeros(0, np.int64), *rarest])
    order = np.argsort(ranks, kind="stable")
    owners, ends = owners[order], np.cumsum(np.bincount(ranks))
    return lambda piece: owners[ends[piece - 1] if piece else 0 : ends[piece]]


def _compared(own: Pieces, other: Pieces, index: int) -> Duplicate:
    shared = len(np.intersect1d(own, other, assume_unique=True))
    return Duplicate(index, shared / (len(own) + len(other) - shared))


def _by_likeness(found: Duplicate) -> tuple[float, int]:
    return found.similarity, -found.of
