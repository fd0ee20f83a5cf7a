"""`vapo benchmark gae` and `logprobs` on small sizes: both sides agree, and the figures can fail.

Not exercised: the full sizes (512 responses of 2.1M tokens; 4096 tokens of 152064 scores), which
take seconds and minutes and are run by hand; a GPU.
"""

import re

import pytest
import torch

from vapo_megatron.cli.benchmark.command import main
from vapo_megatron.cli.benchmark.gae import log_normal_lengths, padded_loop
from vapo_megatron.cli.benchmark.logprobs import PATHS, Settings, measure
from vapo_megatron.errors import ConfigError


def test_lengths_sum_up_and_stay_in_range():
    for tokens in (64, 5000, 64 * 200):
        lengths = log_normal_lengths(64, tokens, 200)
        assert int(lengths.sum()) == tokens
        assert 1 <= int(lengths.min()) and int(lengths.max()) <= 200
    assert torch.equal(log_normal_lengths(64, 5000, 200), log_normal_lengths(64, 5000, 200))
    with pytest.raises(ConfigError, match="tokens=63 must lie between"):
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


def test_the_work_of_a_step(capsys):
    def work(responses):
        tokens = str(300 * responses)
        main(["gae", "--responses", str(responses), "--tokens", tokens, "--step"])
        rows = re.findall(r"^(\D+?) +([\d.]+) +([\d.]+)$", capsys.readouterr().out, re.M)
        return {name: float(cpu) for name, _, cpu in rows}

    found = work(600)
    assert {"exchange", "lambdas, GAE, whitening", "mini-batches", "metrics"} < set(found)
    parts = sum(found.values()) - found["together"]
    assert found["together"] == pytest.approx(parts, abs=0.01 * len(found)) and parts > 0


@pytest.mark.slow
def test_a_process_that_fuses_never_holds_the_logits(capsys):
    main(
        "logprobs --tokens 1024 --vocab-size 65536 --hidden 16 --threads 1 --entropy yes"
        " --pairs 1".split()
    )
    out = capsys.readouterr().out
    logits = 1024 * 65536 * 4 / 1e6
    fused, plain = (float(x) for x in re.findall(r"(\d+) MB above inputs", out))
    # Two chunks of 512 of the 1024 rows, and 20 MB for everything else that a process may take.
    assert fused < logits / 2 + 20
    # Log-probabilities, probabilities, their product, and gradients of all.
    assert plain > 3 * logits
    seconds = re.findall(r"([\d.]+) s +[\d.]+ s of CPU", out)
    assert re.findall(r"median ([\d.]+) s fused, ([\d.]+) s plain", out) == [tuple(seconds)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_path_computes_the_same(dtype):
    results = {}
    for path in PATHS:
        settings = Settings(
            path, tokens=50, vocab_size=300, hidden=8, dtype=dtype,
            entropy=True, temperature=0.7, threads=1, device="cpu",
        )  # fmt: skip
        results[path] = measure(settings).checksum
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert results == pytest.approx(dict.fromkeys(PATHS, results["plain"]), abs=tolerance)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ("gae --responses 0", "--responses=0 must be at least 1"),
        ("gae --tokens 5", "tokens=5 must lie between"),
        ("gae --device nowhere", "nowhere"),
        ("logprobs --pairs 0", "--pairs=0 must be at least 1"),
    ],
)
def test_mistakes_are_named(capsys, arguments, message):
    assert main(arguments.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith("benchmark: ") and message in told and told.count("\n") == 1
