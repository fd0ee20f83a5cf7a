"""A report of a run directory whose files hold other types than a run writes: a page, or one line.

Every field of every file takes values of every JSON type in turn. Not exercised: what a page of
right types shows (test_page.py).
"""

import copy

import pytest
import yaml

from tests import jsonl
from vapo_megatron.cli.report import main
from vapo_megatron.config import VapoConfig
from vapo_megatron.errors import DataError
from vapo_megatron.run.contents import check_config
from vapo_megatron.run.report.page import build_report

TOKENS = {"pieces": ["a", "b"], "entropy": [0.5, None], "advantages": [1.0, -1.0]}
RESPONSE = {
    "sample": 0, "status": "correct", "reward": 1.0, "num_tokens": 2, "truncated": False,
    "text": "ab", "tokens": {**TOKENS, "values": [0.1, 0.2]}, "note": "n", "begin": "b",
    "cut_by": "c", "turns": [{"action": "a", "observation": "o", "reward": 0.5, "end": 1}],
}  # fmt: skip
FILES = {
    "metrics.jsonl": {
        "step": 1, "reward/mean": 0.5, "evaluation/avg@8": 0.5, "critic/explained_variance": None,
        "time/step_seconds": 3.5, "time/generation_seconds": 2.0, "memory/peak_bytes": 10**9,
        "tokens_per_second": 5.0, "rollout/response_length_mean": 2, "of_another_version": {},
    },
    "problems.jsonl": {"step": 1, "group_size": 2, "problems": [0, 1], "correct": [1, 2]},
    "held_out.jsonl": {"step": 1, "group_size": 2, "problems": [0, 1], "correct": [1, 2]},
    "timeline.jsonl": {
        "step": 1, "trainer": [["generation", 1, 0.5, 2.5], ["values", 1, 2.5, 3]], "sampler": []
    },
    "rollouts/step_000001.jsonl": {"prompt": "p", "answer": "1", "responses": [RESPONSE]},
}  # fmt: skip
"""A line of each."""
VALUES = [None, True, -1, 10**400, "text", [None]]


def write(run_dir, name, line):
    file = run_dir / name
    file.parent.mkdir(parents=True, exist_ok=True)
    # Two lines of different steps, as plots over steps need them.
    second = {**line, "step": 2} if line.get("step") == 1 else line
    jsonl.write(file, (line, second))


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "config.yaml").write_text(VapoConfig().to_yaml())
    for name, line in FILES.items():
        write(tmp_path, name, line)
    return tmp_path


def places(value, path=()):
    """Every place in nested lists and objects, as the keys that lead there."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items if isinstance(value, dict | list) else ():
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))
        else:
            yield (*path, key)


def changed(value, path, new):
    found = copy.deepcopy(value)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return found


def outcome(run_dir):
    """A page, or the one line that is told."""
    try:
        return build_report(run_dir).name
    except DataError as error:
        message = str(error)
        assert "\n" not in message and message.startswith(str(run_dir)), message
        assert len(message) < 600
        return message


@pytest.mark.parametrize("name", FILES)
def test_a_field_of_another_type_is_one_line(run_dir, name):
    assert outcome(run_dir) == "report.html"
    refused = set()
    for path in places(FILES[name]):
        for value in VALUES:
            write(run_dir, name, changed(FILES[name], path, value))
            message = outcome(run_dir)
            if message != "report.html":
                assert f"{name} line 1" in message
                refused.add(path[0])
    others = {"of_another_version", "policy_version"}
    assert refused == FILES[name].keys() - others


def test_a_missing_field_is_one_line(run_dir):
    write(run_dir, "problems.jsonl", {"step": 1, "problems": [], "correct": []})
    assert outcome(run_dir).endswith(
        "problems.jsonl line 1: group_size is missing; remove the line"
    )


def test_fields_of_the_configuration(run_dir):
    config = yaml.safe_load(VapoConfig().to_yaml())
    file = run_dir / "config.yaml"
    for section, fields in config.items():
        of_section = [(section,)]
        if isinstance(fields, dict):
            of_section += [(section, field) for field in fields]
        for path in of_section:
            for value in ("text", [1], 3.5):
                try:
                    check_config(file, changed(config, path, value))
                except DataError as error:
                    assert str(error).startswith(f"{file}: {section}") and "\n" not in str(error)
    for path, value in (
        (("algorithm", "value_pretraining_steps"), "3"), (("algorithm",), [1]),
        (("parallel", "world_size"), 1.5), (("seed",), {"a": 1}), (("model", "hf_path"), 7),
    ):  # fmt: skip
        file.write_text(yaml.safe_dump(changed(config, path, value)))
        assert ".".join(path) in outcome(run_dir)


def test_a_configuration_of_another_version_is_shown(run_dir):
    config = yaml.safe_load(VapoConfig().to_yaml())
    config["algorithm"] |= {"of_another_version": [1], "clip_low": 7.0}
    config["another_section"] = {"a": {"b": 1}}
    (run_dir / "config.yaml").write_text(yaml.safe_dump({**config, "reward": None}))
    assert outcome(run_dir) == "report.html"


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "problems.jsonl", "rollouts/step_000001.jsonl"]
)
@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 3000 + b"\n", b"[1]\n", None])
def test_a_file_that_is_something_else(run_dir, name, content):
    file = run_dir / name
    file.unlink()
    file.mkdir() if content is None else file.write_bytes(content)
    outcome(run_dir)


def test_a_run_directory_that_is_a_file(tmp_path, capsys):
    (tmp_path / "run").write_text("")
    assert main([str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "is not a run directory" in told[0]
