"""The installed command: in an environment of its own, far from the checkout, with all its files.

setup.py installs a copy of the sources, which is then removed, next to the test environment's
dependencies. Not exercised: pip itself and its resolver (no network), training (tests/e2e).
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.run.report.test_page import write_run
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron import __version__
from vapo_megatron.cli.main import main
from vapo_megatron.config import recipe_names

ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "setup.py").read_text()


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with the package, which sees the dependencies of this one."""
    root = tmp_path_factory.mktemp("installed")
    venv.create(root / "env", symlinks=True)
    python = root / "env/bin/python"
    own = sysconfig.get_path("purelib", vars={"base": str(root / "env")})
    Path(own, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    source = root / "source"
    shutil.copytree(
        ROOT / "vapo_megatron", source / "vapo_megatron",
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    install = ["setup.py", "-q", "install", "--single-version-externally-managed"]
    done = subprocess.run(
        [python, *install, "--record", root / "record.txt"],
        cwd=source, env=clean(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shutil.rmtree(source)
    return root / "env"


def clean():
    gone = ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    return {**{k: v for k, v in os.environ.items() if k not in gone}, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def vapo(environment, tmp_path):
    """vapo(arguments) -> what the installed command prints, in an empty directory."""

    def run(*arguments):
        done = subprocess.run(
            [environment / "bin/vapo", *map(str, arguments)],
            cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=250,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


def test_the_package_is_the_installed_one(environment, tmp_path):
    code = "import vapo_megatron; print(vapo_megatron.__file__)"
    done = subprocess.run(
        [environment / "bin/python", "-c", code],
        cwd=tmp_path, env=clean(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(done.stdout.strip()).is_relative_to(environment)
    assert sys.prefix not in done.stdout


def test_help(vapo):
    assert vapo("--help").startswith("usage: vapo COMMAND [options]\n")


def test_the_metadata_and_what_belongs_beside_the_code(environment, tmp_path):
    code = (
        "import json, vapo_megatron; from importlib import metadata, resources;"
        "found = metadata.metadata('vapo-megatron'); keys = ['Name', 'Version', 'Author',"
        " 'License', 'Home-page', 'Description-Content-Type'];"
        "own = resources.files('vapo_megatron');"
        "print(json.dumps([{k: found[k] for k in keys}, len(found.get_all('Classifier')),"
        " own.joinpath('py.typed').is_file(), [f.name for f in"
        " own.joinpath('config/recipes').iterdir()], vapo_megatron.load_config('vapo').seed]))"
    )
    done = subprocess.run(
        [environment / "bin/python", "-c", code],
        cwd=tmp_path, env=clean(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    fields, num_classifiers, is_typed, recipes, seed = json.loads(done.stdout)
    assert fields == {
        "Name": "vapo-megatron", "Version": __version__, "License": "Apache-2.0",
        "Author": "The vapo_megatron maintainers", "Home-page": "https://arxiv.org/abs/2504.05118",
        "Description-Content-Type": "text/markdown",
    }  # fmt: skip
    assert num_classifiers > 5 and is_typed and seed == 0
    assert sorted(recipes) == sorted(f"{name}.yaml" for name in recipe_names())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")


def test_a_recipe_by_its_name(vapo):
    out = vapo("train", "--config", "grpo", "--dry-run", "model.hf_path=models/Qwen2.5-7B")
    assert yaml.safe_load(out)["algorithm"]["advantage_estimator"] == "grpo"
    assert vapo("--version") == f"vapo {__version__}\n"


def test_plan(vapo):
    layout = ("--tp", 2, "--pp", 1, "--vllm-tp", 1, "--recompute", "full")
    sizes = ("--responses", 64, "--mini-batch", 32, "--max-tokens", 24576)
    out = vapo("plan", "--model", "Qwen2.5-7B", "--gpus", 8, *layout, *sizes)
    assert "\nto paste:\n" in out and "tensor_model_parallel_size: 2" in out


def test_convert(vapo, tmp_path):
    hf = write_tiny_hf(tmp_path / "hf", num_layers=1)
    there, back = tmp_path / "megatron", tmp_path / "back"
    vapo("convert", "to-megatron", "--hf", hf, "--out", there, "--tensor-model-parallel-size", 2)
    assert main(["convert", "to-hf", "--megatron", str(there), "--out", str(back)]) == 0
    before, after = (load_file(path / "model.safetensors") for path in (hf, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_report(vapo, tmp_path):
    run = write_run(tmp_path / "run", num_steps=2)
    assert vapo("report", run) == f"{run / 'report.html'}\n"
    page = (run / "report.html").read_text()
    folder = ROOT / "vapo_megatron/run/report"
    for name in ("report.css", "report_curves.js", "uplot/uPlot.iife.min.js"):
        assert (folder / name).read_text().strip().splitlines()[-1][-60:] in page, name


DEPENDENCIES_OF = {
    "huggingface_hub": "transformers", "tokenizers": "transformers", "pydantic_core": "pydantic",
    "sympy": "math_verify", "mpmath": "math_verify", "latex2sympy2_extended": "math_verify",
    "yaml": "pyyaml", "megatron": "megatron_core",
}  # fmt: skip
"""Module -> the requirement that brings it, where that has another name."""
OPTIONAL = {
    "vllm", "wandb", "transformer_engine_torch", "reasoning_gym",
    # Of environments.
    "gymnasium", "gem", "skyrl_gym", "omegaconf", "websockets",
}  # fmt: skip


def test_everything_that_is_imported_is_required():
    (runtime,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(SETUP).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RUNTIME"
    ]
    required = {name.split(">")[0].replace("-", "_") for name in runtime}
    imported = set()
    for path in (ROOT / "vapo_megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).split(".")[0])
    imported -= {*sys.stdlib_module_names, "vapo_megatron"} | OPTIONAL
    assert {DEPENDENCIES_OF.get(name, name) for name in imported} <= required
