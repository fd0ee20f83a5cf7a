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


@pytest.mark.parametrize(
    "command", [*COMMANDS, "plan reshard", "convert to-hf", "convert to-megatron", "benchmark gae",
                "benchmark logprobs", "benchmark reshard", "gradients collect", "gradients compare"]
)  # fmt: skip
def test_each_help_begins_with_a_sentence_and_an_example(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    usage, sentence, example, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: vapo {command} ")
    assert sentence.endswith(".") and "\n" not in sentence
    assert example.startswith(f"  vapo {command} ")


def test_the_help_of_training_ends_with_the_fields(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert text.index("options:") < text.index("algorithm.clip_high=0.28") < len(text)
