"""`vapo convert`: what it shows while it works. What it converts is tested in weights/convert."""

import pytest
from safetensors.torch import load_file

from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.cli import convert
from vapo_megatron.cli.command import ProgressBar


@pytest.fixture
def every_count(monkeypatch):
    """Show bytes, from the first one on."""

    def bar(title, unit):
        return ProgressBar(title, after_seconds=0, every_seconds=0)

    monkeypatch.setattr(convert, "ProgressBar", bar)


def test_both_conversions_count_what_they_write(every_count, tmp_path, capsys):
    hf = write_tiny_hf(tmp_path / "hf", num_layers=1, vocab=256)
    size = sum(t.nbytes for t in load_file(hf / "model.safetensors").values())
    there, back = str(tmp_path / "megatron"), str(tmp_path / "back")
    for arguments in (
        ["to-megatron", "--hf", str(hf), "--out", there],
        ["to-hf", "--megatron", there, "--out", back],
    ):
        assert convert.main(arguments) == 0
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) > 5
        assert lines[-1] == f"MB {size:,} / {size:,}, 0:00 left"
