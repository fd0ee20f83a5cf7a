"""Phases and metrics: what is not registered fails on import; what is returned is declared."""

import pytest

from vapo_megatron.config import TimeoutsConfig
from vapo_megatron.config.metrics import KINDS, METRICS, describe, emits, metric_by, named
from vapo_megatron.config.phases import PHASES, TIMED


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


def test_metrics_by_name_are_declared_by_their_pattern_alone():
    for kind in KINDS:
        for pattern in (name for name in METRICS if f"/by_{kind}/" in name):
            group, _, _, what = pattern.split("/")
            what = what.replace("K", "16")
            for label in ("math", "near:Near", "a.b-c_1"):
                name = metric_by(group, kind, label, what)
                assert describe(name) is METRICS[pattern]
                assert named(name) == (group, kind, label, what)
    for name in (
        "reward/by_verifier/math/acuracy", "reward/by_judge/math/accuracy", "reward/by_verifier/x",
        "reward/by_verifier/a b/accuracy", "reward/by_verifier/a/b/accuracy", "reward/mean/x",
        "reward/by_verifier//accuracy", "evaluation/by_source/x/avg@0", "actor/by_source/x/share",
    ):  # fmt: skip
        assert describe(name) is None, name
    assert named("reward/mean") is None and named("reward/by_verifier/a b/accuracy") is None
    with pytest.raises(AssertionError, match="a/b"):
        metric_by("reward", "source", "a/b", "share")
    assert describe("reward/own/length") is METRICS["reward/own/NAME"]
    assert describe("reward/own/a/b") is None

    @emits("reward/by_verifier/NAME/accuracy")
    def measured(name):
        return {name: 1.0}

    assert measured("reward/by_verifier/code/accuracy")
    with pytest.raises(AssertionError, match="reward/by_source/NAME/accuracy"):
        measured("reward/by_source/code/accuracy")
