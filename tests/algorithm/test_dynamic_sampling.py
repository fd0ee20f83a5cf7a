"""Which groups dynamic sampling keeps, by hand.

Not exercised: sampling more of them.
"""

import pytest
import torch

from vapo_megatron.algorithm.dynamic_sampling import group_verdicts, select_groups

# rows 1, 3, 4 and 6 are mixed
VERDICTS = torch.tensor(
    [[0, 0, 0], [0, 1, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1]]
).bool()


@pytest.mark.parametrize(
    "num_groups,rows,missing",
    [(1, [1], 0), (2, [1, 3], 0), (4, [1, 3, 4, 6], 0), (5, [1, 3, 4, 6], 1), (9, [1, 3, 4, 6], 5)],
)
def test_the_first_mixed_groups_are_kept(num_groups, rows, missing):
    kept, wanted = select_groups(VERDICTS, num_groups)
    assert kept.dtype == torch.int64
    assert (kept.tolist(), wanted) == (rows, missing)


def test_rounds_stand_one_after_the_other():
    # The first round finds two of three, and a second one, with two mixed groups, gives one.
    first, second = VERDICTS[:4], VERDICTS[4:]
    assert select_groups(first, 3)[1] == 1
    kept, missing = select_groups(torch.cat([first, second]), 3)
    assert (kept.tolist(), missing) == ([1, 3, 4], 0)


def test_a_group_of_one_is_never_mixed():
    rows, missing = select_groups(torch.tensor([[True], [False]]), 2)
    assert (rows.tolist(), missing) == ([], 2)


def test_nothing_sampled_yet():
    rows, missing = select_groups(torch.zeros(0, 3, dtype=torch.bool), 4)
    assert (rows.tolist(), missing) == ([], 4)


@pytest.mark.parametrize("seed", range(5))
def test_the_layout_does_not_matter(seed):
    # Responses come rank by rank in any order; verdict and position travel together.
    order = torch.randperm(21, generator=torch.Generator().manual_seed(seed))
    verdicts = group_verdicts(VERDICTS.flatten()[order], order, 3)
    assert torch.equal(verdicts, VERDICTS)
    assert select_groups(verdicts, 3)[0].tolist() == [1, 3, 4]


def test_refusals():
    flat, positions = VERDICTS.flatten(), torch.arange(21)
    for bad in (positions[:20], positions + 1, positions.clamp(min=1), positions[:0].new_ones(3)):
        with pytest.raises(ValueError, match=r"positions must hold each of 0 \.\. P\*G-1 once"):
            group_verdicts(flat[: bad.numel()], bad, 3)
    with pytest.raises(ValueError, match="group_size=0 must be at least 1"):
        group_verdicts(flat, positions, 0)
    with pytest.raises(ValueError, match="num_groups=0 must be at least 1"):
        select_groups(VERDICTS, 0)
    for bad in (flat, VERDICTS.long()):
        with pytest.raises(ValueError, match="is_correct: shape"):
            select_groups(bad, 1)
