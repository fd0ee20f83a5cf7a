"""Near-duplicates: what is compared, which text is kept, and that no similar pair is missed.

Not exercised: data sets of full size.
"""

import random

import pytest

from vapo_megatron.cli.prepare.columns import ANSWER_PREFIX, ANSWER_SUFFIX
from vapo_megatron.cli.select.duplicates import (
    Duplicate,
    _hashed,
    _normalized,
    _ranked,
    near_duplicates,
)

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def test_the_similarity_by_hand():
    # abcde bcdef cdefg defgh, and abcde bcdef cdefg defgx: 3 common of 5.
    texts = ["abcdefgh", "abcdefgx"]
    assert near_duplicates(texts, 0.6) == {1: Duplicate(0, 3 / 5)}
    assert near_duplicates(texts, 0.61) == {}


def test_case_spacing_form_and_instructions_do_not_count_but_signs_do():
    asked = f"{ANSWER_PREFIX}What  IS\n{ANSWER_SUFFIX}"
    same = ["What is\u00a0\uff12 + 2?", " what is 2 + 2?", "WHAT\nIS 2 + 2?"]
    found = near_duplicates(["what is", asked, *same, "what is 2 - 2?"], 1.0)
    assert found == {1: (0, 1.0), 3: (2, 1.0), 4: (2, 1.0)}


def test_short_texts_are_one_piece():
    assert near_duplicates(["a", "b", "a", "", "ab", ""], 0.5) == {2: (0, 1.0), 5: (3, 1.0)}
    assert near_duplicates([], 0.5) == {}


def test_only_kept_texts_make_others_duplicates_and_the_most_similar_is_named():
    # A chain: each is like the next (3 of 5 pieces), the ends are not (2 of 6).
    chain = ["abcdefgh", "abcdefgx", "abcdefyx"]
    assert near_duplicates(chain, 0.6) == {1: (0, 0.6)}
    #        all but the last piece   and all of it
    texts = ["abcdefghij", "qrstuvwxyz", "abcdefghijk", "abcdefghijklm"]
    found = near_duplicates(texts, 0.5)
    assert found == {2: (0, 6 / 7), 3: (0, 6 / 9)}
    assert near_duplicates(["abcdefghij!", "?abcdefghij", "abcdefghij"], 0.7) == {
        1: (0, 6 / 8), 2: (0, 6 / 7)
    }  # fmt: skip


def test_a_templates_text_is_not_counted():
    """Of 30 problems in one long template, none is like another; two of the 30 are."""
    template = "You are given a problem. Think about it, and then say what x is. Problem: "
    draw = random.Random(1)
    texts = [template + "".join(draw.choices(ALPHABET, k=12)) for _ in range(30)]
    texts[20] = texts[7][:-1] + "!"
    (found,) = near_duplicates(texts, 0.7).items()
    # 12 letters have 8 pieces of their own, and 4 with letters of the template before them.
    assert found == (20, (7, 11 / 13))
    few = near_duplicates(texts[:5], 0.7)
    assert set(few) == {1, 2, 3, 4}, "of few texts nothing can be said"


def all_pairs(texts, similarity):
    """The same by comparing every text with every kept one."""
    normalized = [_normalized(text) for text in texts]
    pieces = [set(own.tolist()) for own in _ranked([_hashed(text) for text in normalized])]
    kept, found = [], {}
    for i, own in enumerate(pieces):
        likeness = {
            j: 1.0 if normalized[i] == normalized[j]
            else len(own & pieces[j]) / max(1, len(own | pieces[j]))
            for j in kept
        }  # fmt: skip
        best = max(likeness, key=lambda j: (likeness[j], -j), default=None)
        if best is not None and likeness[best] >= similarity:
            found[i] = Duplicate(best, likeness[best])
        else:
            kept.append(i)
    return found


@pytest.mark.parametrize("similarity", [0.25, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("vocabulary", [25, 900])
def test_no_similar_pair_is_missed(similarity, vocabulary):
    draw = random.Random(vocabulary)
    words = ["".join(draw.choices(ALPHABET, k=draw.randint(1, 9))) for _ in range(vocabulary)]
    texts = []
    for _ in range(120):
        if texts and draw.random() < 0.3:
            letters = list(draw.choice(texts))
            for _ in range(draw.randint(0, 6)):
                letters[draw.randrange(len(letters))] = draw.choice("xyz ")
            texts.append("".join(letters))
        else:
            texts.append(" ".join(draw.choices(words, k=draw.randint(1, 25))))
    found = near_duplicates(texts, similarity)
    assert found == all_pairs(texts, similarity) and len(found) > 2
