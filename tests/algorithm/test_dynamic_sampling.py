"""Which groups dynamic sampling keeps, and how many prompts it asks for next, by hand.

Not exercised: sampling them (tests/rollout/test_dynamic_sampling.py).
"""

import pytest
import torch

from vapo_megatron.algorithm.dynamic_sampling import next_round_size, select_groups

# Correct responses of 3: rows 1, 3, 4 and 6 are mixed.
CORRECT = torch.tensor([0, 1, 3, 2, 1, 0, 1])


@pytest.mark.parametrize(
    "num_groups,rows,missing",
    [
        (1, [1], 0),
        (2, [1, 3], 0),
        (4, [1, 3, 4, 6], 0),
        # The first of the others fill the empty places.
        (5, [0, 1, 3, 4, 6], 1),
        (6, [0, 1, 2, 3, 4, 6], 2),
        (9, [0, 1, 2, 3, 4, 5, 6], 5),
    ],
)
def test_the_first_mixed_groups_are_kept(num_groups, rows, missing):
    kept, lacking = select_groups(CORRECT, 3, num_groups)
    assert kept.dtype == torch.int64
    assert (kept.tolist(), lacking) == (rows, missing)


def test_rounds_stand_one_after_the_other():
    # The first round finds two of three, and a second one, with two mixed groups, gives one.
    first, second = CORRECT[:4], CORRECT[4:]
    assert select_groups(first, 3, 3)[1] == 1
    kept, missing = select_groups(torch.cat([first, second]), 3, 3)
    assert (kept.tolist(), missing) == ([1, 3, 4], 0)


def test_what_is_not_kept_can_be_forgotten():
    # Round by round over what was kept so far, as over everything at once.
    everything = kept = numbers = torch.zeros(0, dtype=torch.long)
    lacked = []
    for found in ([0, 3, 2, 0], [3, 1, 0], [2, 0], [0, 1]):
        candidates = torch.cat([numbers, torch.arange(len(found)) + len(everything)])
        everything, kept = (torch.cat([c, torch.tensor(found)]) for c in (everything, kept))
        rows, missing = select_groups(kept, 3, 4)
        kept, numbers = kept[rows], candidates[rows]
        expected, lacking = select_groups(everything, 3, 4)
        assert (numbers.tolist(), missing) == (expected.tolist(), lacking)
        lacked.append(missing)
    assert lacked == [3, 2, 1, 0] and numbers.tolist() == [2, 5, 7, 10]


def test_rewards_decide_where_they_are_given():
    # Row 2 is all correct and row 5 all wrong, but their rewards differ; those of row 1 do not.
    mixed = torch.tensor([False, False, True, True, True, True, False])
    rows, missing = select_groups(CORRECT, 3, 5, mixed)
    assert (rows.tolist(), missing) == ([0, 2, 3, 4, 5], 1)


def test_a_group_of_one_is_never_mixed():
    rows, missing = select_groups(torch.tensor([1, 0]), 1, 2)
    assert (rows.tolist(), missing) == ([0, 1], 2)


@pytest.mark.parametrize(
    "missing,mixed,sampled,groups,size",
    [
        # p = 3/4: (2 + sqrt(2/4)) / (3/4) = 2.707 * 4/3 = 3.6
        (2, 6, 8, 8, 4),
        # p = 1/4: (3 + sqrt(3 * 3/4)) * 4 = (3 + 1.5) * 4 = 18
        (3, 2, 8, 20, 18),
        (3, 2, 8, 17, 17),
        # p = 1/2: (2 + 1) * 2 = 6
        (2, 4, 8, 8, 6),
        # p = 1: exactly what is missing.
        (1, 8, 8, 8, 1),
        (5, 8, 8, 8, 5),
        # Nothing sampled, or nothing mixed: nothing is known but that a step has room for 8.
        (8, 0, 0, 8, 8),
        (8, 0, 40, 8, 8),
    ],
)
def test_the_next_round_asks_for_what_is_missing_over_the_rate(
    missing, mixed, sampled, groups, size
):
    assert next_round_size(missing, mixed, sampled, groups) == size


def test_refusals():
    with pytest.raises(ValueError, match="num_groups=0 must be at least 1"):
        select_groups(CORRECT, 3, 0)
    for bad in (CORRECT - 1, CORRECT + 1):
        with pytest.raises(ValueError, match=r"num_correct must lie in \[0, 3\]"):
            select_groups(bad, 3, 2)
