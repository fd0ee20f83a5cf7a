"""An episode that is played before the start: what a dry run shows of it, and what it refuses."""

import json

import pytest

from tests import jsonl
from tests.rollout.chat_tokenizer import write_chat_tokenizer
from vapo_megatron.cli.checks.episode import try_episode
from vapo_megatron.config import load_config
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.rollout.inputs import read_inputs

OWN = "tests.environments.own_environments"
TOLD = "{% if tools %}{{ tools | tojson }}{% endif %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Shape:
    vocab_size = 10**6


def configured(tmp_path, *overrides, template=CHATML, **row):
    write_chat_tokenizer(tmp_path, template=template)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    prompt = [{"role": "user", "content": "A number."}]
    jsonl.write(tmp_path / "train.jsonl", [{"prompt": prompt, "answer": "7", **row}])
    config = load_config(
        [], [f"model.hf_path={tmp_path}", f"data.train_path={tmp_path}/train.jsonl",
             "rollout.max_prompt_tokens=2000", *overrides],
    )  # fmt: skip
    inputs = read_inputs(
        Shape(), str(tmp_path), config.data, config.rollout, config.evaluation, seed=0,
        environment=config.environment,
    )  # fmt: skip
    return config, inputs


def environment(name, *more):
    return [f"environment.use={OWN}:{name}", "reward.verifier=environment", *more]


def test_a_dry_run_shows_what_the_policy_would_see(tmp_path):
    lines = try_episode(*configured(tmp_path, *environment("GuessTheNumber")))
    text = "\n".join(lines)
    assert " Guess!<|im_end|>\n    | <|im_start|>assistant" in text
    assert "an action, made up (2 tokens):\n    | 1<|im_end|>" in text
    assert "    | higher<|im_end|>" in text and "the episode is over" not in text


def test_without_an_environment_there_is_nothing(tmp_path):
    assert try_episode(*configured(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NeverBuilt", "RuntimeError: no board"),
        ("NoReset", "has no method reset(problem, seed)"),
        ("Missing", "Missing"),
    ],
)
def test_what_cannot_begin_is_refused(tmp_path, name, said):
    with pytest.raises(ConfigError, match="environment") as refused:
        try_episode(*configured(tmp_path, *environment(name)))
    assert said in str(refused.value)


def test_a_beginning_beyond_the_prompts_limit_is_refused(tmp_path):
    given = environment("GuessTheNumber", "rollout.max_prompt_tokens=60")
    with pytest.raises(ConfigError, match=r"more than rollout\.max_prompt_tokens=60"):
        try_episode(*configured(tmp_path, *given))


def test_prompts_tell_of_tools(tmp_path):
    config, inputs = configured(tmp_path, "environment.tools=[calculator]", template=TOLD + CHATML)
    text = inputs.tokenizer.decode(inputs.dataset.problems[0].token_ids)
    told = json.loads(text[: text.index("<|im_start|>")])
    assert [tool["function"]["name"] for tool in told] == ["calculator"]
    assert "the episode is over" in try_episode(config, inputs)[-1], "an action without a call"


def test_tools_need_a_template_that_tells_of_them(tmp_path):
    with pytest.raises(DataError, match="does not write the tools given to it"):
        configured(tmp_path, "environment.tools=[calculator]")
    with pytest.raises(ConfigError, match="no chat template that tells the policy of them"):
        configured(tmp_path, "environment.tools=[calculator]", template=None)


def test_a_row_has_no_tools_of_its_own_then(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    with pytest.raises(DataError, match="the run's environment has others"):
        configured(tmp_path, "environment.tools=[calculator]", template=TOLD + CHATML, tools=[tool])
