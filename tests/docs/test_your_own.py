"""docs/your-own.md: its patches applied to a copy of the package, and what it says of each.

Not exercised: training with them.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.docs.commands import ROOT

SECTIONS = {
    title: re.findall(r"^```(diff|python)\n(.*?)^```$", text, re.M | re.S)
    for title, text in re.findall(
        r"^## (.*?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/your-own.md").read_text(), re.M | re.S
    )
}
# What the page's metric is in a step, by the test of all others.
MEDIAN = """
import torch.distributed as dist
from tests.run.test_step_metrics import SHARES, on_rank
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
*_, metrics = on_rank(SHARES[1], {"lambda_actor": 0.0, "lambda_critic": 1.0}, None)
assert metrics["rollout/response_length_median"] == 2  # of 2, 3 and 1
"""
RUN = """
import json, sys, traceback
told = {}
for title, code in json.load(sys.stdin).items():
    try:
        exec(compile(code, title, "exec"), {"__name__": title})
        told[title] = ""
    except Exception:
        told[title] = traceback.format_exc()
print("told", json.dumps(told))
"""


def told(package):
    """What goes wrong in each section's Python, with the package that lies in a directory."""
    blocks = {t: code for t, found in SECTIONS.items() for kind, code in found if kind == "python"}
    blocks["Metric"] += MEDIAN
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(blocks), capture_output=True, text=True,
        cwd=package, env=environment, check=True,
    )  # fmt: skip
    return json.loads(re.findall(r"^told (.*)$", done.stdout, re.M)[0])


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """(what goes wrong without the patches, and with them)."""
    place = tmp_path_factory.mktemp("patched")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "vapo_megatron", place / "vapo_megatron", ignore=ignore)
    before = told(place)
    for found in SECTIONS.values():
        for kind, diff in found:
            if kind == "diff":
                # A patch that still applies, but only elsewhere or in part, is behind the code.
                command = ["git", "apply", "-p0", "-"]
                subprocess.run(command, input=diff, text=True, cwd=place, check=True)
    return before, told(place)


@pytest.mark.parametrize("title", SECTIONS)
def test_what_the_page_says(patched, title):
    before, after = patched
    assert after[title] == ""
    has_patch = any(kind == "diff" for kind, _ in SECTIONS[title])
    assert bool(before[title]) == has_patch, "the patch is what makes it hold"


def test_each_is_short():
    for title, found in SECTIONS.items():
        added = [line for kind, code in found if kind == "diff" for line in code.splitlines()
                 if line.startswith("+") and not line.startswith("+++")]  # fmt: skip
        assert len(added) <= 20, title
    assert len(SECTIONS) == 6
