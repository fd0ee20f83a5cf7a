"""Prompts that are the text of messages, and what a row has for its chat template.

Not exercised: templates (tests/rollout/test_chat_template.py).
"""

import json

import numpy
import pyarrow
import pyarrow.parquet
import pytest

from tests.data.test_chat import ASSISTANT, SYSTEM, USER, render
from vapo_megatron.cli.prepare.columns import SHAPES, read_problem
from vapo_megatron.data.problems import load_problems
from vapo_megatron.errors import DataError

MESSAGES = [SYSTEM, {"role": "user", "content": 'it\'s \\frac{1}{2} of "4"\n?'}]
TEXTS = {
    "json": json.dumps(MESSAGES),
    "indented": json.dumps(MESSAGES, indent=2),
    "twice": json.dumps(json.dumps(MESSAGES)),
    "python": repr(MESSAGES),
    "array": repr(numpy.array(MESSAGES, dtype=object)),
}  # fmt: skip


def one(tmp_path, prompt, render=render, **columns):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": prompt, "answer": "1", **columns}))
    return load_problems(file, render=render)[0]


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_messages_is_read_as_messages(tmp_path, name):
    expected = one(tmp_path, MESSAGES).prompt
    assert one(tmp_path, TEXTS[name]).prompt == expected and "1}{2" in expected
    row = {"prompt": TEXTS[name], "answer": "1"}
    found = read_problem(SHAPES["plain"], row, "f")
    assert found == (MESSAGES[1]["content"], "1", (SYSTEM,))


def test_one_message_alone_and_the_critics_own(tmp_path):
    assert one(tmp_path, json.dumps(USER)).prompt == "<user>q"
    file = tmp_path / "b.jsonl"
    file.write_text(json.dumps({"prompt": "q", "hint": repr([USER]), "answer": "1"}))
    assert load_problems(file, render=render, critic_prompt_column="hint")[0].critic_prompt == (
        "<user>q"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2] and [3, 4]: which is larger?", "[[1, 2], [3, 4]]", "[]", "{1, 2}", '"q"', "[", "3",
        '[{"x": 1}, {"x": 2}]', '{"role": "a part"}', "array([1, 2])", "array(", "[" * 100_000,
        '[{"role": "user", "content": "q"}] How many messages are that?', r'["\d"]', "(1, 2)",
    ],
)  # fmt: skip
def test_other_texts_stay_texts(tmp_path, text, recwarn):
    assert one(tmp_path, text).prompt == text and not recwarn.list


@pytest.mark.parametrize(
    "text",
    [
        '[{"role": "user", "content": "cut o', "[{'role': 'system'}\n {'role': 'user', 'content'}]",
        str(numpy.array(MESSAGES, dtype=object)), '[{"content": "q", "role": }]',
    ],
)  # fmt: skip
def test_a_text_that_looks_like_messages_is_refused(tmp_path, text):
    for read in (one, lambda _, t: read_problem(SHAPES["plain"], {"prompt": t, "answer": 1}, "f")):
        with pytest.raises(DataError, match="prompt is a text that looks like chat messages, but"):
            read(tmp_path, text)


def test_the_text_of_wrong_messages_says_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match="messages of user, assistant; .*the last must be the user"):
        one(tmp_path, json.dumps([USER, ASSISTANT]))
    with pytest.raises(DataError, match=r"prompt\[0\]=.*'human'.* must be a message with a role"):
        one(tmp_path, json.dumps([{"from": "human", "value": "q"}]))
    with pytest.raises(DataError, match="must be a non-empty string"):
        one(tmp_path, json.dumps([USER]), render=None)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}


def rendered(tmp_path, prompt=(USER,), **columns):
    """The keywords that a template is given, and the messages."""
    given = {}

    def note(messages, **options):
        given.update(options, messages=messages)
        return "q"

    one(tmp_path, list(prompt), render=note, **columns)
    return given


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], repr([TOOL])])
def test_tools_are_lists_or_texts_of_them(tmp_path, tools):
    assert rendered(tmp_path, tools=tools)["tools"] == [TOOL]


@pytest.mark.parametrize("value", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_variables_are_objects_or_texts_of_them(tmp_path, value):
    found = rendered(tmp_path, chat_template_kwargs=value)
    assert found["variables"] == {"enable_thinking": False} and "tools" not in found


@pytest.mark.parametrize("empty", [None, [], {}, "", "[]", "null"])
def test_what_is_empty_is_nothing(tmp_path, empty):
    columns = {"tools": empty, "chat_template_kwargs": empty}
    assert rendered(tmp_path, **columns) == {"messages": [USER]}
    assert one(tmp_path, "q", **columns).prompt == "q"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tools": "add"}, "line 1: tools='add' must be a list of JSON schemas; correct or remove"),
        ({"tools": TOOL}, "tools=.* must be a list of JSON schemas"),
        ({"tools": ["add"]}, "tools=.* must be a list of JSON schemas"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs=.* must be an object of a template"),
    ],
)
def test_what_no_template_can_use_is_named(tmp_path, columns, message):
    with pytest.raises(DataError, match=message):
        rendered(tmp_path, **columns)


def test_a_text_has_no_template(tmp_path):
    columns = {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}}
    with pytest.raises(DataError, match="line 1: tools and chat_template_kwargs are for a chat"):
        one(tmp_path, "q", **columns)
    with pytest.raises(DataError, match="f: tools are for a chat template, but prompt is a text"):
        read_problem(SHAPES["plain"], {"prompt": "q", "answer": 1, "tools": [TOOL]}, "f")


def test_nulls_that_parquet_adds_are_no_keys(tmp_path):
    """A struct has the keys of every row's."""
    other = {"type": "function", "function": {"name": "sub", "parameters": {"b": [None, 2]}}}
    calls = [{"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}]
    answer = {"role": "tool", "name": "add", "content": "3"}
    rows = [
        {"prompt": [USER, *calls, answer], "answer": "1", "tools": [TOOL, other]},
        {"prompt": [USER], "answer": "1", "tools": None},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    given = []

    def note(messages, **options):
        given.append((messages, options))
        return "q"

    load_problems(tmp_path / "a.parquet", render=note)
    assert given[0] == ([USER, {"content": "", **calls[0]}, answer], {"tools": [TOOL, other]})
    assert given[1] == ([USER], {})


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_calls_have_their_arguments_as_objects(tmp_path, arguments, is_wrapped):
    """As text, which OpenAI's interface has, most templates would quote them once more."""
    call = {"name": "add", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": call} if is_wrapped else call
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "1", "content": "3"}]  # fmt: skip
    found = rendered(tmp_path, turns)["messages"][1]
    (call,) = found["tool_calls"]
    assert call.get("function", call) == {"name": "add", "arguments": {"a": 1}}
    assert found["content"] == ""


@pytest.mark.parametrize("calls", [[1], [{}], {"name": "add"}, [{"function": {"arguments": {}}}]])
def test_calls_of_nothing_are_refused(tmp_path, calls):
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, USER]
    with pytest.raises(DataError, match=r"prompt\[1\]=.* must be a message .*tool_calls"):
        rendered(tmp_path, turns)
