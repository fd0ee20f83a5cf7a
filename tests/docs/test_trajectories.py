"""The example of docs/trajectories.md: its file, its verifier, its command and what it prints."""

import json
import re
import shlex

from tests.docs.commands import ROOT, commands
from vapo_megatron.cli.main import main

PAGE = (ROOT / "docs/trajectories.md").read_text()


def block(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)[0]


def test_the_command_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    assert sum(len(block(kind).splitlines()) for kind in ("bash", "json", "python")) <= 20
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/trajectories.jsonl").write_text(block("json"))
    (tmp_path / "steps.py").write_text(block("python"))
    monkeypatch.chdir(tmp_path)
    command, *_ = commands("docs/trajectories.md")
    assert main([*shlex.split(command.text)[1:], "reward.num_workers=1"]) == 0
    assert capsys.readouterr().out == block("text") + "data/states.jsonl\n"
    rows = [json.loads(line) for line in (tmp_path / "data/states.jsonl").open()]
    assert [len(row["prompt"]) for row in rows] == [1, 3, 5]
