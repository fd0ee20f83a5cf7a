"""The README names what exists: every file of the tree, every technique's function, field and test.

Does not run the README's commands; tests/e2e and tests/run.sh do.
"""

import ast
import re
from pathlib import Path

import pytest

from vapo_megatron.config import VapoConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def tree() -> set[str]:
    """Paths in the README's tree."""
    block = README.split("## The tree")[1].split("```")[1]
    folder, paths = "", set()
    for line in block.splitlines():
        name = line.split()[0] if line.split() else ""
        if line.startswith("  "):
            paths.add(folder + name)
        elif name.endswith("/"):
            folder = name
    return paths


def test_the_tree_is_complete():
    folders = ("vapo_megatron", "tools", "examples")
    files = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.name != "__init__.py" and path.suffix != ".pyc"
    }
    assert tree() == files


def technique_rows() -> list[tuple[str, str, str, str, str]]:
    """(name, file, function, field, test) of each row of the table."""
    pattern = r"\| ([^|]+) \| `(\S+): (\w+)` \| `algorithm\.(\w+)` \([^|]+\) \| `(\w+)` \|"
    return re.findall(pattern, README)


def test_there_are_seven():
    assert len(technique_rows()) == 7


@pytest.mark.parametrize("name,file,function,field,test", technique_rows())
def test_a_technique_is_where_the_readme_says(name, file, function, field, test):
    def functions(path):
        return {n.name for n in ast.walk(ast.parse(path.read_text())) if hasattr(n, "name")}

    assert function in functions(ROOT / "vapo_megatron" / file)
    assert field in type(VapoConfig().algorithm).model_fields
    assert test in functions(ROOT / "tests/algorithm/test_seven_techniques.py")


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
