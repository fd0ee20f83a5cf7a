"""The Python of docs/python.md and docs/architecture.md, and docs/limits.md's refusals.

Not exercised: that the program trains; a stand-in takes the trainer's place, whose run is in
tests/test_own_verifier_run.py.
"""

import inspect
import pkgutil
import re
from importlib import import_module
from unittest import mock

import pytest
import torch

import vapo_megatron
from tests.docs.commands import ROOT
from vapo_megatron import algorithm, load_config
from vapo_megatron.errors import ConfigError

PROGRAM, *EQUATIONS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs/python.md").read_text(), re.M | re.S
)
ROWS = re.findall(r"^\| .* \| `([a-z_]+\..*)` \|$", (ROOT / "docs/limits.md").read_text(), re.M)
LOSSES = ("policy", "imitation", "critic", "kl", "dis", "dppo")


def test_the_life_of_a_response():
    page = (ROOT / "docs/architecture.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    exec(block, {})
    assert block.count("assert") == 5  # Each line of numbers is held.


def test_the_program(tmp_path, monkeypatch):
    made = []

    class Trainer:
        def __init__(self, config, verifier):
            made.extend([config.logging.run_dir, verifier("is 7\n", "7")])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def fit(self):
            made.append("fit")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").write_text("seed: 1\n")
    with mock.patch.object(vapo_megatron, "VapoTrainer", Trainer, create=True):
        exec(PROGRAM, {"__name__": "program"})
    assert made == ["runs/first", True, "fit"]


def equations(**changes):
    """What the page's names are in the end, after the first block's lines that are changed."""
    text = "\n".join(EQUATIONS)
    for before, after in changes.items():
        line = re.search(rf"{before}=?.*?int\((.*?\(\))\)", text)
        assert line, before
        text = text.replace(line[0], line[0].replace(f"int({line[1]})", after.format(line[1])))
    names = {}
    exec(text, names)
    return names


def test_every_loss_takes_its_count_as_a_number_or_a_tensor():
    """By the page, whose asserts hold too: the losses are the same, with their gradients."""
    page = equations()
    tensors = equations(**{"num_tokens =": "{}", "num_positive_tokens": "{}"})
    assert isinstance(page["num_tokens"], int) and tensors["num_tokens"].shape == ()
    for name in LOSSES:
        assert torch.equal(page[name], tensors[name]), name
    assert torch.equal(page["logprobs"].grad, tensors["logprobs"].grad)


def test_the_page_calls_every_loss():
    called = "".join(EQUATIONS)
    for module in pkgutil.iter_modules(algorithm.__path__, "vapo_megatron.algorithm."):
        for name, function in inspect.getmembers(import_module(module.name), inspect.isfunction):
            if name.endswith(("_loss", "_kl")) and function.__module__ == module.name:
                assert f"{name}(" in called or name == "actor_loss", name


def test_the_limits_are_there():
    assert len(ROWS) > 10


@pytest.mark.parametrize("fields", ROWS)
def test_what_is_not_there_is_refused(fields):
    with pytest.raises(ConfigError) as refused:
        load_config([], fields.split())
    assert "\n" not in str(refused.value)
