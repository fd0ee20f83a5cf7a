"""The generated tables of the documentation are those that the code gives today."""

import re

from docs import make_reference
from vapo_megatron.config import FileConfig, ScaleConfig, SourceConfig, VapoConfig
from vapo_megatron.config.metrics import METRICS


def test_the_checked_in_pages_are_up_to_date():
    for path, text in make_reference.pages().items():
        assert path.read_text() == text, f"{path.name}: run python docs/make_reference.py"


def test_every_field_and_every_metric_has_a_row():
    names = {
        f"{section}.{field}"
        for section, value in VapoConfig()
        if section != "seed"
        for field in type(value).model_fields
    }
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
