"""Calls in an action's text, by hand and against the libraries' parsers.

Not exercised: calls that a model makes (test_tools.py has an episode's texts).
"""

import itertools
import json
import random
import sys
import time
import types
from pathlib import Path

import pytest
from renderers.base import ToolCallParseStatus
from renderers.parsing import parse_llama_3, parse_qwen3

from vapo_megatron.environments.tool_calls import Call, first_tagged, hermes, llama3_json

ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
CLOSING = "</tool_call>"
CALLED = Call("add", {"a": 1, "b": 2})


def tagged(*contents):
    return "".join(f"<tool_call>\n{content}\n</tool_call>" for content in contents)


@pytest.mark.parametrize(
    ("action", "calls"),
    [
        ("The answer is 3.", []),
        ("", []),
        (tagged(ADD), [CALLED]),
        (f"Let me add.\n{tagged(ADD)}\nDone.", [CALLED]),
        (tagged(ADD, '{"name": "now"}'), [CALLED, Call("now", {})]),
        (f"<tool_call>{ADD}</tool_call>", [CALLED]),
        (f"```xml\n{tagged(ADD)}\n```", [CALLED]),
        (tagged('{"name": "f", "arguments": {}, "id": "c1"}'), [Call("f", {}, "c1")]),
        (tagged('{"name": "f", "id": 7}'), [Call("f", {})]),
        (tagged('{"name": "f", "arguments": [1]}'), [Call("f", [1])]),
        (
            tagged('{"name": "f", "arguments": {"x": {"y": [{"z": "}"}]}}}'),
            [Call("f", {"x": {"y": [{"z": "}"}]}})],
        ),
        (tagged('{"name": "f", "arguments": {"x": "</tool_call>"}}'), [Call("f", {"x": CLOSING})]),
        (f"<think>{tagged(ADD)}</think>No.", []),
        (tagged(ADD) + "</think>" + tagged('{"name": "f"}'), [Call("f", {})]),
        (f"<think>I begin.{tagged(ADD)}", [CALLED]),
    ],
)  # fmt: skip
def test_hermes(action, calls):
    assert list(hermes(action)) == calls


@pytest.mark.parametrize(
    ("action", "wrong"),
    [
        (tagged("add(1, 2)"), ["it is not JSON: Expecting value at character 0"]),
        (tagged("{'name': 'f'}"), ["it is not JSON: Expecting property name"]),
        (tagged(ADD[:-1]), ["it is not JSON: Expecting ',' delimiter at character 46"]),
        (tagged(""), ["it is not JSON: Expecting value"]),
        (tagged("[]"), ['it must be {"name": the tool\'s name, "arguments": {...}}']),
        (tagged('{"name": ""}'), ["it must be"]),
        (tagged('{"name": 3}'), ["it must be"]),
        (tagged(f"{ADD}\n{ADD}"), ["there is more than one object before </tool_call>"]),
        (f"<tool_call>\n{ADD}", ["</tool_call> is missing"]),
        (f"<tool_call><tool_call>{ADD}</tool_call>", ["it is not JSON"]),
        ("<tool_call>", ["it is not JSON"]),
        (tagged('{"name": "f", "arguments": {"x": NaN}}'), ["it is not JSON that can be read: N"]),
        (tagged("[" * 100_000), ["it is not JSON that can be read: "]),
        (tagged("{", ADD, "}"), ["it is not JSON", "", "it is not JSON"]),
    ],
)  # fmt: skip
def test_what_hermes_cannot_read(action, wrong):
    assert_wrong(hermes(action), wrong)


def assert_wrong(calls, wrong):
    found = [call.wrong for call in calls]
    assert len(found) == len(wrong)
    for each, beginning in zip(found, wrong, strict=True):
        assert each.startswith(beginning) and bool(each) == bool(beginning)


def test_a_number_of_too_many_digits_cannot_be_read():
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(4300)  # As in a new process.
    try:
        (call,) = hermes(tagged('{"name": "f", "arguments": ' + "9" * 5000 + "}"))
    finally:
        sys.set_int_max_str_digits(before)
    assert call.wrong.startswith("it is not JSON that can be read: Exceeds the limit")


@pytest.mark.parametrize(
    ("action", "calls"),
    [
        ("The answer is 3.", []),
        ("", []),
        ('{"answer": 3}', []),
        ("{1, 2}", []),
        ("{", []),
        ('I call {"name": "f", "parameters": {}}', []),
        ('```json\n{"name": "f", "parameters": {}}\n```', []),
        ('{"name": "f", "parameters": {"x": 1}}', [Call("f", {"x": 1})]),
        (' {"name": "f", "arguments": {"x": 1}}\n', [Call("f", {"x": 1})]),
        ('{"type": "function", "name": "f", "parameters": {}}', [Call("f", {})]),
        ('<|python_tag|>{"name": "f"}', [Call("f", {})]),
        ('{"name": "f"}; {"name": "g"}', [Call("f", {}), Call("g", {})]),
        ('{"name": "f"}\n{"name": "g"};', [Call("f", {}), Call("g", {})]),
        ('<think>{"name": "g"}</think>\n\n{"name": "f"}', [Call("f", {})]),
    ],
)
def test_llama3_json(action, calls):
    assert list(llama3_json(action)) == calls


@pytest.mark.parametrize(
    ("action", "wrong"),
    [
        ('{"name": "f", "parameters": {', ["it is not JSON: Expecting property name"]),
        ('{"name": f}', ["it is not JSON"]),
        ('{"name": 3}', ['it must be {"name": the tool\'s name, "parameters": {...}}']),
        ("<|python_tag|>print(1)", ["it is not JSON: Expecting value at character 0"]),
        ('{"name": "f"} and that was all', ["", "it is not JSON: Expecting value"]),
        ('{"name": "f", "parameters": ' + "[" * 100_000, ["it is not JSON that can be read"]),
    ],
)
def test_what_llama3_json_cannot_read(action, wrong):
    assert_wrong(llama3_json(action), wrong)


@pytest.mark.parametrize("text", ["<tool_call>", "<tool_call>{", "<tool_call>{</tool_call>"])
def test_many_openings_take_little_time(text):
    """Of as many calls as an environment reads."""
    began = time.monotonic()
    list(itertools.islice(hermes(text * (1_000_000 // len(text))), 100))
    assert time.monotonic() - began < 5


class Letters:
    """A tokenizer of one letter a token, and one for each tag, as the libraries ask for."""

    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")
    unk_token_id = None

    def encode(self, text, **_):
        ids = []
        while text:
            tag = next((tag for tag in self.tags if text.startswith(tag)), text[0])
            ids.append(ord(tag) if len(tag) == 1 else -1 - self.tags.index(tag))
            text = text[len(tag) :]
        return ids

    def decode(self, ids, **_):
        return "".join(chr(i) if i >= 0 else self.tags[-1 - i] for i in ids)

    def convert_tokens_to_ids(self, token):
        return -1 - self.tags.index(token) if token in self.tags else None

    def get_vocab(self):
        return {tag: self.convert_tokens_to_ids(tag) for tag in self.tags}


PIECES = (
    ADD, '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"s": "a\\"}{"}}', "{", "}",
    '{"name": ""}', '{"answer": [1, {"b": null}]}', "Well, ", "\n\n", "[1]", "<tool_call>",
    "<tool_call>\n", "\n</tool_call>", "</tool_call>", "</tool_call>\n<tool_call>", tagged(ADD),
    tagged('{"name": "g"}'), tagged(ADD, ADD),
)  # fmt: skip


def actions():
    """Texts of pieces that make calls, half calls, and neither."""
    draw = random.Random(0)
    for _ in range(3000):
        text = "".join(draw.choices(PIECES, k=draw.randint(1, 7)))
        yield draw.choice(("", "", "<think>", "<think>Hm.</think>\n")) + text


def read(calls):
    return [(call.name, call.arguments) if not call.wrong else None for call in calls]


def of_renderers(parsed):
    return [
        (call.name, call.arguments) if call.status == ToolCallParseStatus.OK else None
        for call in parsed.tool_calls
    ]


def test_hermes_reads_what_renderers_reads():
    letters, count = Letters(), 0
    tags = {tag: letters.convert_tokens_to_ids(tag) for tag in letters.tags}
    for action in actions():
        parsed = parse_qwen3(
            letters, letters.encode(action), stop_ids=set(), tool_call_id=tags["<tool_call>"],
            tool_call_end_id=tags["</tool_call>"], reasoning_end_id=tags["</think>"],
        )  # fmt: skip
        assert read(hermes(action)) == of_renderers(parsed), action
        count += any(of_renderers(parsed))
    assert count > 300


def test_llama3_json_reads_what_renderers_reads():
    """That library reads one call, and takes one that is not JSON for an answer."""
    count = 0
    for action in actions():
        if "<think>" in action:
            continue  # It does not know it.
        parsed = parse_llama_3(Letters(), Letters().encode(action), stop_ids=set())
        mine = read(llama3_json(action))
        if len(mine) <= 1:
            assert [call for call in mine if call] == of_renderers(parsed), action
            count += len(mine)
    assert count > 100


@pytest.mark.parametrize(("form", "name"), [(hermes, "hermes"), (llama3_json, "llama3_json")])
def test_well_formed_calls_are_those_of_vllm(form, name):
    from vllm.tool_parsers import ToolParserManager

    parser = ToolParserManager.get_tool_parser(name)(Letters())
    request = types.SimpleNamespace(tools=None, tool_choice="auto")
    calls = [json.loads(piece) for piece in PIECES[:2]]
    for count in (0, 1, 2, 3):
        texts = [json.dumps(call) for call in (calls * 2)[:count]]
        action = tagged(*texts) if form is hermes else "; ".join(texts)
        found = parser.extract_tool_calls(action or "No call.", request).tool_calls
        theirs = [(c.function.name, json.loads(c.function.arguments)) for c in found]
        assert read(form(action)) == theirs and len(theirs) == count


SWIRL = json.loads((Path(__file__).parents[1] / "data/swirl.json").read_text())


@pytest.mark.parametrize("case", SWIRL["parse"], ids=lambda case: case["text"])
def test_the_first_tag_of_the_vectors(case):
    found = first_tagged(case["text"], ["search_query", "answer"])
    kinds = {None: "none", "search_query": "call", "answer": "answer"}
    assert kinds[found and found.tag] == case["kind"]
    assert (found and found.content) == case["content"]


def test_what_stands_behind_the_first_tag():
    text = "Hm. <s>a</s> then <s>b</s>"
    assert text[: first_tagged(text, ["s"]).end] == "Hm. <s>a</s>"
    assert first_tagged("<s> </s><s>b</s>", ["s"]).content == "b"
    assert first_tagged("<s>draft</s></think><s>b</s>", ["s"]).content == "b"
    assert first_tagged("<s.>b</s.>", ["s."]).tag == "s." and not first_tagged("<st>b</st>", ["s."])
    assert first_tagged("<s>a\nb</s>", ["s"]).content == "a\nb"


def test_tags_without_end_take_linear_time():
    start = time.process_time()
    assert first_tagged("<s>" * 100_000 + "x" * 100_000, ["s"]) is None
    assert first_tagged("<s>" + "<" * 200_000, ["s"]) is None
    assert time.process_time() - start < 2
