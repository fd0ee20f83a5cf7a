"""The line of a command that takes long. Not exercised: the bar on a terminal."""

from vapo_megatron.progress_bar import ProgressBar


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
