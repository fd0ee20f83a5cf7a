"""Rows in Weights & Biases: the real package, offline. Not exercised: its server and its sync."""

import json
import struct
import sys
import time

import pytest

from vapo_megatron.cli.preflight import check_inputs
from vapo_megatron.config import LoggingConfig, VapoConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.run.metrics import MetricsWriter
from vapo_megatron.run.wandb_run import check_wandb

BLOCK, HEADER = 32768, 7
LOGGING = LoggingConfig(
    wandb_project="vapo", wandb_name="first try", wandb_group="seeds", wandb_tags=["a", "b"]
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def records(file):
    """Yield the records of a .wandb file, whose format is LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # A whole record, or the last part of one.
            yield Record.FromString(parts)
            parts = b""


def logged(run_dir):
    """[(run id, how it is called, config, rows, exit status)] of each process, in order."""
    import wandb

    wandb.teardown()  # Its service writes files on its own time.
    found = []
    for file in run_dir.glob("wandb/offline-run-*/*.wandb"):
        of_file = list(records(file))
        run = next(r.run for r in of_file if r.WhichOneof("record_type") == "run")
        config = {u.key: json.loads(u.value_json) for u in run.config.update}
        rows = [
            {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
            for r in of_file
            if r.WhichOneof("record_type") == "history"
        ]
        rows = [{n: v for n, v in row.items() if not n.startswith("_")} for row in rows]
        status = [r.exit.exit_code for r in of_file if r.WhichOneof("record_type") == "exit"]
        started = (run.start_time.seconds, run.start_time.nanos)
        called = (run.project, run.display_name, run.run_group, list(run.tags))
        found.append((started, (run.run_id, called, config, rows, status)))
    return [what for _, what in sorted(found, key=lambda one: one[0])]


def test_a_resume_continues_the_same_run(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {dtype: bfloat16}\n")

    def writer(resume_step):
        return MetricsWriter(tmp_path, False, resume_step, logging=LOGGING)

    with writer(0) as first:
        for step in range(3):
            first.write(step, {"reward/mean": float(step), "critic/loss": float("nan")})
    time.sleep(1.1)  # W&B names its directories by the second.
    with pytest.raises(RuntimeError), writer(2) as resumed:
        resumed.write(2, {"reward/mean": 9.0})
        raise RuntimeError
    with writer(0) as another:
        another.write(0, {"reward/mean": 5.0})

    first, resumed, another = logged(tmp_path)
    assert first[1] == ("vapo", "first try", "seeds", ["a", "b"]) == resumed[1]
    assert first[2]["model"] == {"dtype": "bfloat16"}
    assert first[3] == [{"step": step, "reward/mean": step} for step in range(3)]
    assert first[0] == resumed[0] != another[0], "from scratch is a run of its own"
    assert resumed[3] == [{"step": 2, "reward/mean": 9}]
    assert (first[4], resumed[4], another[4]) == ([0], [1], [0])


def test_a_missing_package_is_told_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = VapoConfig(logging={"wandb_project": "vapo"})
    with pytest.raises(
        ConfigError, match="^logging.wandb_project=vapo needs the package wandb; pip"
    ):
        check_inputs(config, None)


def test_a_name_without_a_project_is_told():
    for name, value in (("wandb_name", "a"), ("wandb_group", "a"), ("wandb_tags", ["a"])):
        with pytest.raises(ConfigError, match=f"^logging.{name}=.* needs logging.wandb_project"):
            check_wandb(LoggingConfig(**{name: value}))
