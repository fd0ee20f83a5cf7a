"""How commands end, and their progress bar. Real signals, in this process, none of torchrun's.

A terminal is a stream that says that it is one.
"""

import io
import signal
import sys

import pytest

from vapo_megatron.cli.command import Parser, ProgressBar, run
from vapo_megatron.errors import DataError, tell


def test_what_it_returns_is_printed_by_the_first_rank(capsys, monkeypatch):
    assert run("tool", lambda: "done", interrupted="x") == 0
    assert run("tool", lambda: None, interrupted="x") == 0
    assert run("tool", lambda: 1, interrupted="x") == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run("tool", lambda: "again", interrupted="x") == 0
    assert capsys.readouterr().out == "done\n"


def test_a_nodes_number_is_no_rank(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert run("tool", lambda: "done", interrupted="x") == 0
    assert capsys.readouterr().out == "done\n"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DataError("file a, line 3 is wrong"), "tool: file a, line 3 is wrong\n"),
        (PermissionError(13, "Permission denied", "/a"), "tool: [Errno 13] Permission denied: "),
    ],
)
def test_a_mistake_is_one_line_and_2(error, words, capsys):
    def work():
        raise error

    assert run("tool", work, interrupted="x") == 2
    told = capsys.readouterr().err
    assert told.startswith(words) and told.count("\n") == 1


def test_a_mistake_is_told_where_torchrun_has_no_directory_any_more(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone/0/error.json"))
    tell("no room")
    assert capsys.readouterr().err == "no room\n"


def test_a_wrong_option_is_one_line_and_2(capsys):
    parser = Parser(prog="tool")
    parser.add_argument("--number", type=int)
    assert run("tool", lambda: parser.parse_args(["--number", "x"]), interrupted="x") == 2
    told = capsys.readouterr().err
    assert told == "tool: argument --number: invalid int value: 'x'; --help lists the options\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_one_line_and_130(number, capsys):
    before = signal.getsignal(number)
    assert run("tool", lambda: signal.raise_signal(number), interrupted="nothing is left") == 130
    assert capsys.readouterr().err == "tool: interrupted; nothing is left\n"
    assert signal.getsignal(number) is before


def test_an_interrupt_that_compiled_code_turns_into_another_error_is_one():
    def work():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise SystemError("compiled code returned a result with an exception set") from None

    assert run("tool", work, interrupted="x") == 130


def test_a_signal_that_is_left_out_keeps_its_handler():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(True))
    try:
        work = lambda: signal.raise_signal(signal.SIGTERM)  # noqa: E731
        assert run("tool", work, interrupted="x", signals=[signal.SIGINT]) == 0 and seen
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_bug_is_neither(capsys):
    def work():
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run("tool", work, interrupted="x")
    assert capsys.readouterr().err == ""


def shown_lines(capsys, counts, total=2000, **options):
    with ProgressBar("rows", **options) as bar:
        for count in counts:
            bar.show(count, total)
    return capsys.readouterr().err.splitlines()


def test_lines_where_there_is_no_terminal(capsys, monkeypatch):
    often = {"after_seconds": 0, "every_seconds": 0}
    first, then, last = shown_lines(capsys, [1000, 1500, 2000], **often)
    assert first == "rows 1,000 / 2,000", "how long these took is not known"
    assert then.startswith("rows 1,500 / 2,000, 0:0") and then.endswith(" left")
    assert last == "rows 2,000 / 2,000, 0:00 left"
    rarely = {"after_seconds": 0, "every_seconds": 3600}
    found = shown_lines(capsys, [500, 1000, 2000, 2000], **rarely)
    assert len(found) == 2 and found[-1] == last, "the first and the last one, each once"
    megabytes = shown_lines(capsys, [2 * 10**9], 5 * 10**9, unit=10**6, **often)
    assert megabytes[0] == "rows 2,000 / 5,000"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert shown_lines(capsys, [1000], **often) == [], "one rank speaks for all"


def test_quick_work_shows_nothing(capsys, monkeypatch):
    assert shown_lines(capsys, [1000, 2000], after_seconds=3600) == []
    assert shown_lines(capsys, [2000], after_seconds=0) == [], "there is nothing left to wait for"
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressBar("rows", after_seconds=3600) as bar:
        bar.show(1000, 2000)
    assert sys.stderr.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with ProgressBar("rows", after_seconds=0) as bar:
        bar.show(1000, 2000)
        bar.show(2000, 2000)
    shown = sys.stderr.getvalue()
    assert "rows" in shown and "2,000 / 2,000" in shown
    assert " left" not in shown, "no lines beside the bar"
