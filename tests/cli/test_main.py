"""The command `vapo`: its list of subcommands, each one's help, and a name that is none.

What the subcommands do is tested where each is; that it works once installed, in test_installed.py.
"""

import pytest

from vapo_megatron.cli.main import COMMANDS, main


def test_help_lists_every_command_with_a_sentence(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert main([]) == 0 and capsys.readouterr().out == text
    rows = [line.split(maxsplit=1) for line in text.splitlines() if line.startswith("  ")]
    assert [name for name, _ in rows] == list(COMMANDS)
    assert all(sentence.endswith(".") and len(sentence) < 70 for _, sentence in rows)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trian", "vapo: 'trian' is not a command; did you mean train? vapo --help lists them\n"),
        ("xyz", "vapo: 'xyz' is not a command; vapo --help lists them\n"),
        ("--dry-run", "vapo: '--dry-run' is not a command; vapo --help lists them\n"),
    ],
)
def test_a_name_that_is_none(name, words, capsys):
    assert main([name]) == 2
    assert capsys.readouterr() == ("", words)
