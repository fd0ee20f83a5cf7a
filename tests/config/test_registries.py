"""Phases and metrics: what is not registered fails on import; what is returned is declared."""

import pytest

from vapo_megatron.config.metrics import METRICS, describe, emits
from vapo_megatron.config.phases import PHASES, TIMED
from vapo_megatron.config.schema import TimeoutsConfig


def test_an_unregistered_metric_fails_where_it_is_declared():
    with pytest.raises(KeyError, match="actor/lost.*METRICS"):
        emits("actor/loss", "actor/lost")


def test_what_is_returned_was_declared():
    @emits("actor/loss", "evaluation/avg@K")
    def measured(name):
        return "batch", {name: 1.0}

    assert measured("evaluation/avg@16") == ("batch", {"evaluation/avg@16": 1.0})
    with pytest.raises(AssertionError, match="critic/loss"):
        measured("critic/loss")


def test_an_unregistered_phase_fails_on_import():
    with pytest.raises(ImportError, match="WARM_UP"):
        exec("from vapo_megatron.config.phases import WARM_UP")


def test_every_phase_has_its_limit_and_every_limit_a_phase():
    fields = set(TimeoutsConfig.model_fields) - {"silence_seconds"}
    assert {phase.limit for phase in PHASES.values()} == fields


def test_what_is_timed_is_described():
    for name in TIMED:
        assert PHASES[name].sentence in describe(f"time/{name}_seconds").description
        assert describe(f"memory/{name}_peak_bytes").unit == "bytes"
    assert all(describe(name) is METRICS[name] for name in METRICS if "*" not in name)
