"""No code from data, no network that was not asked for.

Reads source text for what a single test could not show: that no place loads a pickle, evaluates a
string or trusts a checkpoint's code. Not exercised here: hostile checkpoints (tests/weights), what
a report shows (tests/run/report/test_browser.py), hostile answers (tests/reward), secrets in a
run's files (tests/e2e/test_run.py).
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.weights.tiny_hf import write_tiny_model
from vapo_megatron import config
from vapo_megatron.config.load import _UniqueKeys
from vapo_megatron.rollout.vllm.arguments import engine_arguments

ROOT = Path(__file__).resolve().parents[1]
FILES = [p for room in ("vapo_megatron", "tools", "examples") for p in (ROOT / room).rglob("*.py")]

# Calls that run what they read, whatever they are given.
FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen",
    "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads",
    "shelve.open", "dill.load", "dill.loads", "joblib.load", "torch.jit.load", "torch.hub.load",
    "pandas.read_pickle", "yaml.unsafe_load", "yaml.full_load", "runpy.run_path",
}  # fmt: skip
# Places whose calls read nothing that a user exchanges, or where it can do no harm.
ALLOWED = {
    # Between the processes of one run, as torch's own collectives of objects.
    "vapo_megatron/parallel/reduce.py": {"pickle.loads"},
    # megatron-core's own source, translated on import, and Python's kind of cache of that.
    "vapo_megatron/parallel/megatron_on_cpu.py": {"compile", "marshal.loads"},
    # A pipe that only the parent process writes to; what comes back from a worker is JSON.
    "vapo_megatron/sandbox/worker.py": {"pickle.loads"},
    # A class that the user's own program passed to VapoTrainer, in such a message.
    "vapo_megatron/reward/user_code.py": {"pickle.loads"},
    # Between the ranks of one run, as torch.distributed's own gather_object.
    "vapo_megatron/parallel/store.py": {"pickle.loads"},
    # The examples' own trainers, as `python SCRIPT` would; the tables name them, not a user.
    "examples/tiny/runner/forked.py": {"runpy.run_path"},
    # Programs and tests, in a process that can do nothing else (test_hostile_programs.py).
    "vapo_megatron/sandbox/inside.py": {"compile", "eval", "exec"},
}


def keyword(call, name):
    """The value of a call's keyword: a constant, a name, or None."""
    values = [k.value for k in call.keywords if k.arg == name]
    return ast.unparse(values[0]) if values else None


def dangers(tree):
    """Return the calls and classes of a module that could run code from data."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "pickle.Unpickler" in map(ast.unparse, node.bases):
            if not any(getattr(part, "name", "") == "find_class" for part in node.body):
                found.append(node)
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        is_danger = (
            name in FORBIDDEN
            or (name == "torch.load" and keyword(node, "weights_only") != "True")
            or (name in ("yaml.load", "yaml.load_all") and keyword(node, "Loader") != "_UniqueKeys")
            or (name.split(".")[0] in ("np", "numpy") and keyword(node, "allow_pickle") == "True")
            or (keyword(node, "shell") not in (None, "False"))
            or (keyword(node, "trust_remote_code") not in (None, "False"))
        )
        if is_danger:
            found.append(node)
    return found


def test_no_place_runs_what_it_reads():
    assert len(FILES) > 100
    wrong = [
        f"{name}:{node.lineno}: {ast.unparse(node)[:80]}"
        for name, path in ((str(path.relative_to(ROOT)), path) for path in FILES)
        for node in dangers(ast.parse(path.read_text()))
        if ast.unparse(getattr(node, "func", node)) not in ALLOWED.get(name, ())
    ]
    assert not wrong
    assert issubclass(_UniqueKeys, yaml.SafeLoader)


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f)", "torch.load(f, weights_only=False)", "pickle.load(f)", "eval(text)",
        "yaml.load(f, Loader=yaml.Loader)", "np.load(f, allow_pickle=True)",
        "subprocess.run(x, shell=True)", "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "class A(pickle.Unpickler): pass", "pickle.Unpickler(f).load()",
    ],
)  # fmt: skip
def test_a_place_that_did_would_be_seen(source):
    assert dangers(ast.parse(source))


def test_vllm_is_not_asked_to_trust_a_checkpoint():
    for on_cpu in (True, False):
        arguments = engine_arguments(
            "model", config.RolloutConfig(), 100,
            dtype="bfloat16", seed=0, offload=True, on_cpu=on_cpu,
        )  # fmt: skip
        assert not arguments.get("trust_remote_code", False)


def test_a_configuration_cannot_make_objects(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("seed: !!python/object/apply:os.mkdir [made]\n")
    with pytest.raises(config.ConfigError, match="invalid YAML: could not determine a cons"):
        config.load_config(file)
    with pytest.raises(config.ConfigError, match="seed='!!python.*' must be a valid integer"):
        config.load_config([], ["seed=!!python/object/apply:os.mkdir [made]"])
    assert not Path("made").exists()


def test_the_environment_is_not_read_into_a_configuration(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    loaded = config.load_config([], ["logging.run_dir=$HF_TOKEN/${HF_TOKEN}"])
    assert "hf_secret" not in loaded.to_yaml()


# The command in a process that says which hosts it asks for. Sockets of C++ are not seen.
WATCHED = """
import sys

def watch(event, arguments):
    if event == "socket.getaddrinfo":
        print("network:", arguments[0], file=sys.stderr)
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        print("network:", arguments[1], file=sys.stderr)

sys.addaudithook(watch)
from vapo_megatron.cli.train import main
code = main(sys.argv[1:])
sys.audit("socket.getaddrinfo", "would.be.seen")
sys.exit(code)
"""


def test_a_model_on_this_machine_is_read_without_a_network(tmp_path):
    """By what checks a run's files, in a process to which nobody has said that it is offline."""
    write_tiny_model(tmp_path, num_layers=1, hidden=128, ffn=32, vocab=64)
    (tmp_path / "data.jsonl").write_text('{"prompt": "w3", "answer": 1}\n')
    (tmp_path / "run.yaml").write_text("rollout: {max_prompt_tokens: 8, max_response_tokens: 8}")
    arguments = ["--config", tmp_path / "run.yaml", "--dry-run", f"model.hf_path={tmp_path}"]
    arguments += [f"data.train_path={tmp_path}/data.jsonl", f"logging.run_dir={tmp_path}/run"]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *map(str, arguments)],
        cwd=ROOT, env={k: v for k, v in os.environ.items() if not k.startswith("HF_")},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "network: would.be.seen\n")
