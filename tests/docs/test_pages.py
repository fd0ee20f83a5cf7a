"""The documentation's links lead somewhere, and each of its commands is run by a test or marked.

Runs the commands that take seconds; test_commands.py runs the others (-m slow). Not exercised: what
the pages say in words.
"""

import functools
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.docs.commands import MARKS, PAGES, ROOT, RUNS, commands, inline_commands, run_of
from vapo_megatron.cli.main import main
from vapo_megatron.config import load_config

LINKING = [*PAGES, "CHANGELOG.md"]
BLOCKS = [command for page in PAGES for command in commands(page)]
INLINE = [command for page in PAGES for command in inline_commands(page)]
QUICK = [c for c in BLOCKS if not c.mark and (run := run_of(c)) and run.is_quick]


def test_the_pages_have_commands():
    assert len(BLOCKS) > 40
    assert all(commands(page) for page in PAGES), "each page begins with one"


def test_every_command_is_run_by_a_test_or_marked():
    unknown = [command for command in BLOCKS if command.mark not in ("", *MARKS)]
    assert not unknown, f"marks are {MARKS}: {unknown}"
    lost = [c for c in [*BLOCKS, *INLINE] if not c.mark and run_of(c) is None]
    assert not lost, f"give them a row in tests/docs/commands.py, or a mark: {lost}"
    both = [command for command in BLOCKS if command.mark and run_of(command)]
    assert not both, f"a test runs it: take off the mark, or the row: {both}"


def test_every_row_runs_a_command():
    used = {run_of(command) for command in [*BLOCKS, *INLINE]}
    assert [run.start for run in RUNS if run not in used] == []


def test_a_test_elsewhere_runs_the_same_program():
    for run in [run for run in RUNS if run.by]:
        program = Path(next(word for word in run.start.split() if "/" in word))
        text = (ROOT / run.by).read_text()
        assert program.name in text or program.stem in text, f"{run.by} does not run {program}"


def output(command, monkeypatch, capfd):
    """What it prints: `vapo` in this process, another program in one of its own."""
    program, *arguments = shlex.split(command.text)
    monkeypatch.chdir(ROOT)
    if program == "vapo":
        assert main([*arguments, *run_of(command).added]) == 0, capfd.readouterr().err
    else:
        line = " ".join([command.text, *run_of(command).added])
        assert subprocess.run(["bash", "-c", line], timeout=100).returncode == 0
    return capfd.readouterr().out


@pytest.mark.parametrize("command", QUICK, ids=lambda command: f"{command.page}: {command.text}")
def test_a_quick_command(command, monkeypatch, capfd):
    assert run_of(command).shows in output(command, monkeypatch, capfd)


def test_every_block_of_yaml_is_a_configuration(tmp_path):
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    blocks = [
        (page, block)
        for page, text in texts.items()
        for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.M | re.S)
    ]
    assert {page for page, _ in blocks} >= {"docs/data.md", "docs/reward.md"}
    for _, block in blocks:
        (tmp_path / "block.yaml").write_text(block)
        load_config(tmp_path / "block.yaml")


@functools.cache
def anchors(path: Path) -> set[str]:
    """GitHub's names of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere(subtests):
    for page in LINKING:
        with subtests.test(page=page):
            text = (ROOT / page).read_text()
            for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
                file, _, anchor = target.partition("#")
                path = (ROOT / page).parent / file if file else ROOT / page
                assert path.exists(), f"{page}: {target}"
                assert not anchor or anchor in anchors(path), f"{page}: no heading for {target}"


def test_a_function_is_in_the_file_that_its_name_links_to():
    links = re.findall(r"\[`(\w+)`\]\((\S+\.py)\)", (ROOT / "README.md").read_text())
    assert len(links) == 7, "the seven techniques'"
    for name, file in links:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{file} does not define {name}"


def test_every_page_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\((docs/\w[\w-]*\.md)", (ROOT / "README.md").read_text()))
    assert linked == {page for page in PAGES if page.startswith("docs/")}
