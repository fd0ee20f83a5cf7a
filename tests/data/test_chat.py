"""Prompts of chat messages, from JSONL and parquet, and what a wrong one says.

Not exercised: real templates (tests/rollout/test_tokenizer.py has the tokenizer's part).
"""

import json

import pyarrow
import pyarrow.parquet
import pytest

from vapo_megatron.data.chat import read_messages
from vapo_megatron.data.problems import load_problems
from vapo_megatron.errors import DataError

SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
CALLING = {**ASSISTANT, "tool_calls": [{"name": "f", "arguments": {}}]}
TOOL = {"role": "tool", "content": "2"}


def render(messages):
    return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def test_messages_become_texts_beside_texts(tmp_path):
    prompts = [[USER], [SYSTEM, USER], [SYSTEM, USER, ASSISTANT, USER]]
    rows = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = ["<user>q", "<system>s<user>q", "<system>s<user>q<assistant>a<user>q"]
    for name in ("a.parquet", "a.jsonl"):
        found = load_problems(tmp_path / name, render=render)
        assert [p.prompt for p in found] == texts, name
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "q", "answer": 1}))
    (problem,) = load_problems(tmp_path / "b.jsonl", render=render)
    assert problem.prompt == "q"


@pytest.mark.parametrize(
    "prompt",
    [[USER, CALLING, TOOL], [TOOL], [USER, {**ASSISTANT, "prefix": True}],
     [SYSTEM, USER, {**ASSISTANT, "prefix": False}, USER]],
)  # fmt: skip
def test_a_tools_answer_or_the_beginning_of_the_response_may_be_last(prompt):
    found = read_messages(prompt, "prompt", "f")
    assert found == [{k: v for k, v in m.items() if k != "prefix"} for m in prompt]


def test_what_parquet_adds_to_a_row_is_nothing():
    """Its rows have every key of any row; an empty system message is the system's choice."""
    found = read_messages([{**SYSTEM, "content": "", "name": None}, USER], "prompt", "f")
    assert found == [{"role": "system", "content": ""}, USER]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt has messages of nobody; at most the first may be the system's, and the last"),
        ([SYSTEM], "prompt has messages of system; .* the last must be the user's, a tool's, or"),
        ([USER, ASSISTANT], "messages of user, assistant; .* an assistant's text with prefix=true"),
        ([USER, {**ASSISTANT, "prefix": False}], "of user, assistant; .* text with prefix=true"),
        ([USER, {**ASSISTANT, "prefix": True}, USER], "messages of user, assistant, user; at most"),
        ([{**ASSISTANT, "prefix": True}, ASSISTANT], "messages of assistant, assistant; at most"),
        ([USER, {**ASSISTANT, "prefix": 1}], r"prompt\[1\]=.* must be a message"),
        ([{**USER, "prefix": True}], r"prompt\[0\]=.* must be a message"),
        ([USER, {**CALLING, "prefix": True}], "of user, assistant; at most the first may be"),
        ([USER, {**ASSISTANT, "content": "", "prefix": True}], "prompt ends with an empty message"),
        ([USER, SYSTEM, USER], "messages of user, system, user; at most the first may be the"),
        (["q"], r"prompt\[0\]='q' must be a message with a role \(system, user, assistant, t"),
        ([USER, {**USER, "role": "critic"}], r"prompt\[1\]=.*'critic'.* must be a message"),
        ([{"role": "user"}], r"prompt\[0\]=.* must be a message"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"prompt\[0\]=.* must be a message"),
        ([{**USER, "tool_calls": [1]}], r"prompt\[0\]=.* and nothing else; correct or remove"),
        ([{**USER, "content": ""}], "prompt ends with an empty message; correct or remove"),
        ([{**USER, "content": "\ud800"}], r"prompt\[0\] contains half of a surrogate pair"),
    ],
)
def test_what_is_no_chat_is_named_with_a_remedy(tmp_path, prompt, message):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": prompt, "answer": "1"}))
    with pytest.raises(DataError, match=f"a.jsonl, line 1: .*{message}") as error:
        load_problems(file, render=render)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("column", ["tools", "chat_template_kwargs"])
def test_what_a_template_is_given_can_be_encoded(tmp_path, column):
    file = tmp_path / "a.jsonl"
    file.write_text(
        json.dumps(
            {
                "prompt": [USER],
                "answer": "1",
                "tools": [{"name": "f"}],
                column: '[{"a": "\\ud800"}]' if column == "tools" else {"a": "\ud800"},
            }
        )
    )
    with pytest.raises(DataError, match=f"line 1: {column} contains half of a surrogate pair"):
        load_problems(file, render=render)


def test_a_template_that_does_not_take_them_names_the_row(tmp_path):
    def refuse(messages):
        raise DataError("the tokenizer has no chat template")

    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": [USER], "answer": "1"}))
    with pytest.raises(
        DataError,
        match="line 1: prompt has chat messages, but the tokenizer has no chat template; correct",
    ):
        load_problems(file, render=refuse)
    with pytest.raises(DataError, match="must be a non-empty string"):
        load_problems(file)
