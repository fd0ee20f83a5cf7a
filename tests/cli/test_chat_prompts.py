"""Chat prompts before a run, an evaluation and a selection: one date for all of a run, warnings.

The commands run in this process, up to where vLLM would start. Not exercised: whole runs on two
days, processes that start on either side of midnight (tests/parallel/test_store.py has how they
agree).
"""

import datetime
import json
import os
from functools import partial

import pytest
import yaml

from tests.rollout.chat_tokenizer import CHATML, SIZE, write_chat_tokenizer
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.cli import preflight, train
from vapo_megatron.cli.checks import contents
from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.cli.sampling import inputs as sampling_inputs
from vapo_megatron.cli.sampling import samples
from vapo_megatron.cli.select import select
from vapo_megatron.cli.select.rules import Rules
from vapo_megatron.config import load_config
from vapo_megatron.data.storage import to_line
from vapo_megatron.errors import DataError
from vapo_megatron.rollout import inputs as inputs_module
from vapo_megatron.rollout import tokenizer as tokenizer_module

FIRST, LATER = "2024-02-29", "2024-03-01"
DATED = "{{ 'Today is ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A model whose template writes the date, and its data."""
    place = tmp_path_factory.mktemp("chat")
    write_tiny_hf(place / "model", num_layers=1, hidden=128, ffn=32, vocab=SIZE)
    for name in ("config", "generation_config"):
        file = place / f"model/{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": 0}))
    write_chat_tokenizer(place / "model", template=DATED)
    row = {"prompt": [{"role": "user", "content": "1 + 1 = ?"}], "answer": "2"}
    (place / "data.jsonl").write_text(json.dumps(row) + "\n")
    return place


@pytest.fixture(autouse=True)
def no_progress(monkeypatch):
    """A slow machine has nothing else to say either."""
    for module in (contents, sampling_inputs):
        monkeypatch.setattr(module, "ProgressBar", partial(ProgressBar, after_seconds=3600))


@pytest.fixture
def day(monkeypatch):
    """day("2024-02-29"): it is that day."""

    def set_day(text):
        class Date(datetime.date):
            @classmethod
            def today(cls):
                return cls.fromisoformat(text)

        clock = type("Clock", (), {"date": Date, "datetime": datetime.datetime,
                                   "time": datetime.time})  # fmt: skip
        monkeypatch.setattr(tokenizer_module, "datetime", clock)

    return set_day


def config_of(good, run_dir, *overrides):
    paths = [f"model.hf_path={good}/model", f"data.train_path={good}/data.jsonl",
             f"evaluation.path={good}/data.jsonl", f"logging.run_dir={run_dir}"]  # fmt: skip
    return load_config([], [*paths, "parallel.world_size=1", "rollout.max_response_tokens=8",
                            "rollout.max_prompt_tokens=256", *overrides])  # fmt: skip


def save(run_dir, config, inputs):
    """Write what a checkpoint knows of a run."""
    made = run_dir / "checkpoints/step_000001"
    made.mkdir(parents=True)
    state = {"data": inputs.dataset.state_dict(), "date": inputs.date}
    (made / "state.json").write_text(json.dumps({"step": 1, "run": state}))
    (run_dir / "checkpoints/latest").write_text("step_000001")
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))


def text_of(dataset):
    return dataset.rows[0].prompt


def test_a_run_keeps_the_date_of_its_first_day(good, tmp_path, day, monkeypatch):
    config = config_of(good, tmp_path / "run")
    day(FIRST)
    inputs = preflight.check_inputs(config, None)
    assert inputs.date == FIRST and text_of(inputs.dataset).startswith("Today is 29 Feb 2024\n")
    assert text_of(inputs.held_out) == text_of(inputs.dataset)
    state = {"data": inputs.dataset.state_dict(), "date": inputs.date}
    day(LATER)
    fresh = preflight.check_inputs(config, None)
    assert fresh.date == LATER and "01 Mar 2024" in text_of(fresh.dataset)
    with pytest.raises(DataError, match="content of the data set"):
        fresh.dataset.load_state_dict(state["data"])
    monkeypatch.setattr(contents, "own_state", lambda _: {"run": state})
    monkeypatch.setattr(contents, "check_checkpoint", lambda *_: None)
    again = preflight.check_inputs(config, None)
    assert again.date == FIRST and text_of(again.held_out) == text_of(inputs.held_out)
    again.dataset.load_state_dict(state["data"])


def test_a_process_that_read_on_the_next_day_reads_again(good, tmp_path, day, monkeypatch):
    day(LATER)
    inputs = preflight.check_inputs(config_of(good, tmp_path / "run"), None)
    asked = []
    monkeypatch.setattr(inputs_module.store, "agree", lambda *a: asked.append(a) or FIRST)
    agreed = inputs.agreed()
    assert agreed.date == FIRST and asked == [("date", LATER)]
    for dataset in (agreed.dataset, agreed.held_out):
        assert text_of(dataset).startswith("Today is 29 Feb 2024\n")
    assert agreed._replace(date=None).agreed().dataset is agreed.dataset and len(asked) == 1


def test_evaluations_have_the_runs_date_or_their_own_first_day(good, tmp_path, day):
    config = config_of(good, tmp_path / "run", "evaluation.samples=1")
    day(FIRST)
    save(tmp_path / "run", config, preflight.check_inputs(config, None))
    export = tmp_path / "run/hf_export"
    export.symlink_to(good / "model")
    out, data = tmp_path / "out.jsonl", good / "data.jsonl"
    begun = sampling_inputs.check(good / "model", data, config, out)
    assert begun.header["date"] == begun.inputs.date == FIRST
    samples.check_out(out, begun)
    assert out.read_text() == to_line({"evaluation": 1, **begun.header}), "for all processes"
    day(LATER)
    for path in (tmp_path / "run", export):
        found = sampling_inputs.check(path, data, config, tmp_path / "new")
        assert found.header["date"] == FIRST, path
    assert sampling_inputs.check(good / "model", data, config).header["date"] == LATER
    again = sampling_inputs.check(good / "model", data, config, out)
    assert again.header == begun.header
    samples.check_out(out, again)


def test_a_selection_goes_on_with_its_first_day(good, tmp_path, day):
    config, out = config_of(good, tmp_path / "run", "evaluation.samples=1"), tmp_path / "a.parquet"
    arguments = (good / "model", good / "data.jsonl", config, Rules(None, None, None, None), out)
    day(FIRST)
    job = select.prepare(*arguments)
    assert select.select_from_samples(job) is None and job.samples.exists()
    day(LATER)
    assert select.prepare(*arguments).evaluation.header == job.evaluation.header
    assert select.select_from_samples(select.prepare(*arguments)) is None


def test_a_template_without_a_date_changes_no_header(good, tmp_path, day):
    hf = tmp_path / "hf"
    hf.mkdir()
    for file in (good / "model").iterdir():
        os.link(file, hf / file.name)
    os.unlink(hf / "tokenizer_config.json")
    os.unlink(hf / "tokenizer.json")
    write_chat_tokenizer(hf)
    config = config_of(good, tmp_path / "run", f"model.hf_path={hf}")
    assert preflight.check_inputs(config, None).date is None
    assert "date" not in sampling_inputs.check(hf, good / "data.jsonl", config).header


@pytest.mark.parametrize("overrides", [[], ["rollout.stop_token_ids=[0,2]"]], ids=str)
def test_a_dry_run_says_that_a_turn_would_go_on(good, tmp_path, capsys, overrides):
    file = tmp_path / "config.yaml"
    file.write_text(config_of(good, tmp_path / "run").to_yaml())
    assert train.main(["--config", str(file), "--dry-run", *overrides]) == 0
    told = capsys.readouterr().err
    words = "warning: the chat template ends a turn with <|im_end|> (2), which is no stop token"
    assert told.count(words) == (not overrides) and told.count("\n") == told.count(words)
