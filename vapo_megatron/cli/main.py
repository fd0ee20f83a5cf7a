"""The command `vapo`: lists its subcommands, and hands over to one of them."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import vapo_megatron
from vapo_megatron.errors import tell
from vapo_megatron.parallel.health import early_stop


class Command(NamedTuple):
    """A subcommand."""

    module: str
    """In this package; its `main` takes the rest of the command line, returns the exit code."""
    sentence: str


COMMANDS = {
    "init": Command("init", "Write a small configuration for a model at hand."),
    "train": Command("launch", "Train a model, on one GPU or many nodes."),
    "evaluate": Command("evaluate.command", "Measure avg@k, pass@k and majority@k of a model."),
    "sample": Command("sample", "Print a few responses of a model."),
    "plan": Command("plan", "Find layouts that fit a cluster; no GPU needed."),
    "convert": Command("convert", "Convert weights between Hugging Face and megatron-core."),
    "prepare": Command("prepare.command", "Make a data file of prompts and answers."),
    "select": Command("select.command", "Keep prompts by what a base policy makes of them."),
    "probe": Command("probe.command", "Make prompts that go on after a chain with an error."),
    "report": Command("report", "Write an HTML report of a run, or a comparison of several."),
    "trajectories": Command(
        "trajectories.command", "Sample episodes to train on later, or shorten right responses."
    ),
    "states": Command("states.command", "Make prompts of the states of trajectories."),
    "benchmark": Command("benchmark.command", "Time parts of the package against plain code."),
    "gradients": Command("gradients", "Compare the gradients of two layouts."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit code, or 2 where there is no such one."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(f"vapo {vapo_megatron.__version__}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        tell(f"vapo: {name!r} is not a command; {hint}vapo --help lists them")
        return 2
    early_stop.end_on_interrupt(f"vapo {name}: interrupted; nothing was started")
    # One at a time: planning takes no torch, and a mistake in an option no time.
    module = importlib.import_module(f"vapo_megatron.cli.{COMMANDS[name].module}")
    return module.main(rest)


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {command.sentence}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: vapo COMMAND [options]",
            "",
            "Train reasoning models with VAPO (arXiv 2504.05118) on megatron-core and vLLM.",
            "",
            "commands:",
            *rows,
            "",
            "vapo COMMAND --help shows examples and options; vapo --version prints the version.",
        ]
    )
