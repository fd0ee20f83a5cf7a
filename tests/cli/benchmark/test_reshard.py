"""`vapo benchmark reshard`: what it counts as held, and that a run measures the fewest bytes.

    bash tests/run.sh tests/cli/benchmark/test_reshard.py -m slow      a run in 2 processes

Does not exercise: 4 processes, and the sizes at which the times mean something.
"""

import re

import pytest
import torch
from safetensors.torch import load_file

from vapo_megatron.cli.benchmark.command import main
from vapo_megatron.cli.benchmark.reshard import _elements, write_numbered_model


def test_every_element_has_a_number(tmp_path):
    count = write_numbered_model(tmp_path, 256, 2, 512)
    tensors = load_file(tmp_path / "model.safetensors")
    # 4 heads of 64 and 1 key-value head: q 256, k and v 64 rows each, with biases; o; gate, up and
    # down of 1024; two norms; the last norm; embedding and lm_head.
    layer = 384 * 257 + 256 * 256 + 3 * 1024 * 256 + 2 * 256
    assert count == 2 * layer + 256 + 2 * 512 * 256
    assert _elements(list(tensors.values()), count).all()
    norm = tensors.pop("model.norm.weight")
    without = _elements([*tensors.values(), torch.zeros(3)], count)
    assert int((~without).sum()) == 256 and without[-1]
    assert (_elements([norm], count) == ~without).all()


def test_a_size_that_does_not_divide_is_named(capsys):
    assert main(["reshard", "--hidden", "100"]) == 2
    assert "--hidden=100 must be a multiple of 256" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_receives_what_is_lacking(capfd):
    main("reshard --processes 2 --hidden 256 --layers 2 --vocab-size 1024 --repeats 1".split())
    rows = [line for line in capfd.readouterr().out.splitlines() if "->" in line]
    assert len(rows) == 5
    for row in rows:
        assert re.search(r" 1\.000 +[\d.]+ s ", row), row
