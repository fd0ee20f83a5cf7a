"""The mixture beside the dense model: its models, its jobs and its table."""

import dataclasses
import subprocess
import sys
from argparse import Namespace

import pytest
import torch

from tests.examples.tiny import ROOT

# isort: split
import architecture
from experts import main
from make_base_model import short_recipe


def recipe(**changes):
    return dataclasses.replace(short_recipe(0), **changes)


def test_a_token_has_as_much_of_the_mixture_as_of_the_dense_network():
    dense = architecture.build_model(recipe(), 40, 2)
    mixture = architecture.build_model(recipe(experts=8), 40, 2)
    own = mixture.model.layers[0].mlp
    width = dense.model.layers[0].mlp.down_proj.weight.shape[1]
    assert mixture.config.num_experts_per_tok * own.experts.down_proj.shape[-1] == width
    assert own.experts.down_proj.shape[0] == 8 and own.gate.weight.shape[0] == 8
    # Each expert's matrices begin as a network of their width would.
    half = mixture.config.hidden_size**-0.5
    assert own.experts.gate_up_proj.std().item() == pytest.approx(half, rel=0.05)
    assert own.experts.down_proj.std().item() == pytest.approx((width / 2) ** -0.5 / 2, rel=0.05)
    again = architecture.build_model(recipe(experts=8), 40, 2)
    pairs = zip(mixture.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def jobs(quick, seeds=(0, 1, 2)):
    args = Namespace(quick=quick, seeds=list(seeds), overrides=[], out=None)
    return {job.name: job for job in main.plan(args).jobs}


def test_the_arms_of_a_kind_share_what_they_start_from():
    whole = jobs(quick=False)
    assert len([name for name in whole if name.endswith("/base")]) == 6
    for seed in range(3):
        arms = {name: whole[f"experts/seed_{seed}/{name}"] for name in ("off", "r2", "r3")}
        for name, job in arms.items():
            assert f"algorithm.router_replay={name}" in job.command
            assert f"experts/seed_{seed}/value" in job.needs
        assert f"dense/seed_{seed}/value" in whole[f"dense/seed_{seed}/vapo"].needs
    assert list(whole["experts/seed_0/base"].command[-2:]) == ["--experts", "8"]
    assert "--experts" not in whole["dense/seed_0/base"].command
    quick = jobs(quick=True)
    trained = {name.partition("/seed_0/")[::2] for name, job in quick.items() if job.num_steps}
    assert trained == {
        ("dense", "value"),
        ("dense", "vapo"),
        ("experts", "value"),
        ("experts", "r3"),
    }


def test_columns_by_hand():
    rows = [
        {"step": 0, "evaluation/avg@4": 0.25},
        {"step": 1, "actor/other_routes_fraction": 0.01, "time/step_seconds": 2.0},
        {"step": 2, "actor/other_routes_fraction": 0.03, "evaluation/avg@4": 0.5},
    ]
    runs = {"vapo": {0: rows}, "r3": {0: rows}}
    found = {name: cell(runs, "r3") for name, cell in main.COLUMNS.items()}
    assert found["accuracy before"] == "0.250" and found["in the end"] == "0.500"
    assert found["seconds a step"] == "2.0" and found["in updates"] == "2.00%"
    assert found["there with own routes"] == found["in compared steps"] == "-"
    for row, own in ((rows[1], None), (rows[2], 0.25)):
        row |= {main.DIFFERENCE: 0.125 if own else 0.5} | ({main.OWN_ROUTES: own} if own else {})
    cells = [main.COLUMNS[name](runs, "r3") for name in (
        "log-probability difference", "in compared steps", "there with own routes",
    )]  # fmt: skip
    assert cells == ["3.12e-01", "1.25e-01", "2.50e-01"]


def test_what_starts_the_runs_loads_no_torch():
    """Their processes are forked from it, and would inherit its threads."""
    code = "import sys, experts.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "examples/tiny", check=True)


@pytest.mark.slow
def test_the_quick_form(tmp_path):
    subprocess.run(
        ["bash", "examples/run_experts_tiny.sh", "--quick", "--out", str(tmp_path)], cwd=ROOT,
        check=True, timeout=900,
    )  # fmt: skip
    table = (tmp_path / "table.md").read_text()
    assert "| dense |" in table and "router_replay=r3 |" in table
