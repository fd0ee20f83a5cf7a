"""The generated tables of the documentation are those that the code gives today."""

import re

from docs import features, make_reference, rooms
from vapo_megatron.config import FileConfig, ScaleConfig, SourceConfig, VapoConfig
from vapo_megatron.config.metrics import METRICS


def test_the_checked_in_pages_are_up_to_date():
    for path, text in make_reference.pages().items():
        assert path.read_text() == text, f"{path.name}: run python docs/make_reference.py"


def test_every_field_and_every_metric_has_a_row():
    names = set()
    for section, value in VapoConfig():
        for field, info in getattr(type(value), "model_fields", {}).items():
            inner = getattr(info.annotation, "model_fields", {"": None})
            names |= {f"{section}.{field}.{name}".rstrip(".") for name in inner}
    names |= {f"data.sources.NAME.{field}" for field in SourceConfig.model_fields}
    names |= {f"evaluation.sources.NAME.{field}" for field in FileConfig.model_fields}
    names |= {f"reward.scales.NAME.{field}" for field in ScaleConfig.model_fields}
    rows = re.findall(r"^\| `(\S+)` \|", make_reference.configuration(), re.M)
    assert set(rows) == {*names, "seed"}
    assert re.findall(r"^\| `(\S+)` \|", make_reference.metrics(), re.M) == list(METRICS)


def test_a_row_by_hand():
    row = r"\| `algorithm.length_adaptive_alpha` \| `0.05` \| number > 0 \| .* Paper: `alpha`. \|"
    assert re.search(row, make_reference.configuration())
    # A | within a cell would end it.
    assert "| `model.hf_path` | `null` | text \\| null |" in make_reference.configuration()


def test_a_page_behind_the_code_is_seen(monkeypatch):
    monkeypatch.setitem(METRICS, "reward/new", METRICS["reward/mean"])
    (behind,) = [p for p, text in make_reference.pages().items() if p.read_text() != text]
    assert behind.name == "metrics.md"


def test_the_matrix_of_features():
    """By hand: a pair that is refused, one that is not; no feature is refused by itself."""
    assert all(features.refusal(own) is None for own in features.FEATURES.values())
    assert all(features.refusal(own) is None for own in features.PARALLELISM.values())
    sampling, off, shared = (
        features.FEATURES[name] for name in ("dynamic sampling", "one step off", "shared queue")
    )
    assert "disaggregated must not be combined" in features.refusal(sampling, off)
    assert features.refusal(sampling, shared) is None


def test_the_picture_of_the_rooms():
    arrows = {"a": frozenset("bc"), "b": frozenset("c"), "c": frozenset(), "d": frozenset()}
    assert rooms.floors(arrows) == [["c", "d"], ["b"], ["a"]]
    assert rooms.needed(arrows) == [("a", "b"), ("b", "c")]
