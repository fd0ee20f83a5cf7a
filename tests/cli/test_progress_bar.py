"""The line of a command that takes long, and its bar on what says that it is a terminal."""

import io
import sys

from vapo_megatron.cli.progress_bar import ProgressBar


def test_lines_where_there_is_no_terminal(capsys):
    with ProgressBar("rows", 2000, every_seconds=0) as bar:
        bar.show(1000)
        bar.show(2000)
    with ProgressBar("rows", 2000, every_seconds=3600) as bar:
        bar.show(1000)
        bar.show(2000)
        bar.show(2000)
    with ProgressBar("rows", 2000, shown=False, every_seconds=0) as bar:
        bar.show(2000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3, "often; the last one always, and once; not at all"
    assert lines[0].startswith("rows 1,000 / 2,000, 0:0") and lines[0].endswith(" left")
    assert lines[1] == lines[2] == "rows 2,000 / 2,000, 0:00 left"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressBar("rows", 2000) as bar:
        bar.show(1000)
        bar.show(2000)
    shown = sys.stderr.getvalue()
    assert "rows" in shown and "2,000 / 2,000" in shown
    assert " left" not in shown, "no lines beside the bar"
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressBar("rows", 2000, shown=False) as bar:
        bar.show(2000)
    assert sys.stderr.getvalue() == ""
