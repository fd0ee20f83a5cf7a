"""tools/benchmark.py gae on a small batch: what it compares is the same, and it is not slower.

Not exercised: the full size (512 responses, 2.1M tokens), which takes seconds and is run by hand.
"""

import re

import pytest
import torch

from tools.benchmark import log_normal_lengths, main, padded_loop


def test_lengths_sum_up_and_stay_in_range():
    for tokens in (64, 5000, 64 * 200):
        lengths = log_normal_lengths(64, tokens, 200)
        assert int(lengths.sum()) == tokens
        assert 1 <= int(lengths.min()) and int(lengths.max()) <= 200
    assert torch.equal(log_normal_lengths(64, 5000, 200), log_normal_lengths(64, 5000, 200))
    with pytest.raises(ValueError, match="tokens=63 must lie between"):
        log_normal_lengths(64, 63, 200)


def test_padded_loop_golden_numbers():
    # r = (0, 1), V = (.5, .5), lambda .5: A_2 = .5, A_1 = 0 + .5 * .5, and padding holds 0.
    # The other response is one token long: A = 1 - .5.
    advantages, returns = padded_loop(
        torch.tensor([[0.0, 1, 0], [1, 0, 0]]),
        torch.tensor([[0.5, 0.5, 0], [0.5, 0, 0]]),
        torch.tensor([[1.0, 1, 0], [1, 0, 0]]),
        torch.tensor([0.5, 0.5]),
    )
    assert advantages.tolist() == [[0.25, 0.5, 0], [0.5, 0, 0]]
    assert returns.tolist() == [[0.75, 1, 0], [1, 0, 0]]


def test_ratio_and_error(capsys):
    main(["gae", "--responses", "64", "--tokens", "40000", "--max-length", "3000"])
    out = capsys.readouterr().out
    ratios = [float(x) for x in re.findall(r"([\d.]+) times faster", out)]
    errors = [float(x) for x in re.findall(r"error (\S+) of max", out)]
    assert len(ratios) == len(errors) == 2
    assert min(ratios) > 2
    assert max(errors) < 1e-6
