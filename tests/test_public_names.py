"""What `import vapo_megatron` gives: names on demand. Not exercised: what they do."""

import pytest

import vapo_megatron
from tests.alone import printed_by


def test_the_configuration_is_there_without_torch_and_the_trainer_with_it():
    code = (
        "import sys, vapo_megatron as v; light = sorted(m for m in sys.modules if m[:4] == 'vapo');"
        "v.load_config('vapo'); early = 'torch' in sys.modules;"
        "from vapo_megatron import VapoConfig, VapoTrainer, load_config;"
        "print(light, early, VapoTrainer.__module__, VapoConfig.__name__)"
    )
    assert printed_by(code).split("\n")[0] == (
        "['vapo_megatron'] False vapo_megatron.training.loop VapoConfig"
    )  # fmt: skip


def test_a_name_that_is_none():
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = vapo_megatron.Trainer
