"""Functions as tools, in the processes that play episodes: calls, results, and hostile cases.

Not exercised: the forms of a call (test_tool_calls.py), the built-in tools themselves
(test_calculator.py, test_python_tool.py), a chat template that is given the schemas.
"""

import json

import pytest

from tests.alone import loaded_by
from tests.environments import own_tools
from tests.environments.playing import TOOLS, answers, play, started
from tests.sandbox import limits
from vapo_megatron.environments.step import CUT
from vapo_megatron.environments.tool_schemas import Tool
from vapo_megatron.environments.tools import MAX_ERROR_CHARACTERS, Tools, result_text
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward.verifier import Problem
from vapo_megatron.sandbox.client import SandboxUnavailable

MODULE = "tests.environments.own_tools"
NAMES = [f"{MODULE}:{name}" for name in ("add", "keep", "shaped", "do")]
LIMIT = 2000


@pytest.fixture(scope="module")
def playing():
    """Episodes of the tools in own_tools.py."""
    options = {"tools": NAMES, "max_calls": 3, "max_result_characters": LIMIT}
    playing = play(TOOLS, options, name="tools")
    yield playing
    playing.close()


def call(name, arguments, **more):
    content = {"name": name, "arguments": arguments, **more}
    return f"<tool_call>\n{json.dumps(content)}\n</tool_call>"


def acted(playing, *actions):
    """Play an episode of these actions -> what is said of each, as far as it goes."""
    playing.begin("a", Problem("What?"), 0)
    assert answers(playing, "a")["a"].observation == ""
    found = []
    for action in actions:
        playing.act("a", action)
        found.append(answers(playing, "a")["a"])
        assert found[-1].reward == 0.0 and found[-1].verdict is None
        if found[-1].done:
            return found
    playing.end("a")
    return found


def contents(playing, action):
    (played,) = acted(playing, action)
    assert not played.done, played.note
    return [message["content"] for message in played.observation]


def test_a_call_is_answered_and_an_action_without_one_is_the_last(playing):
    first, last = acted(playing, f"I add. {call('add', {'a': 1, 'b': 2})}", "It is 3.")
    assert first.observation == [{"role": "tool", "name": "add", "content": "3"}]
    assert last.done and last.observation == "" and not last.failed


def test_several_calls_of_one_action_are_made_in_order(playing):
    action = call("keep", {"x": "a"}, id="one") + "and" + call("keep", {"x": "b"}, id="two")
    (played,) = acted(playing, action)
    assert played.observation == [
        {"role": "tool", "name": "keep", "tool_call_id": "one", "content": "1"},
        {"role": "tool", "name": "keep", "tool_call_id": "two", "content": "2"},
    ]
    # What a tool keeps is its episode's own, and there until that ends.
    later = acted(playing, call("keep", {"x": "a"}), call("keep", {"x": "b"}))
    assert [played.observation[0]["content"] for played in later] == ["1", "2"]


def test_calls_beyond_the_limit_are_not_made(playing):
    found, after = acted(playing, call("keep", {"x": ""}) * 5, call("keep", {"x": ""}))
    assert [message["content"] for message in found.observation] == [
        "1", "2", "3", "error: only the first 3 calls of an action are made",
    ]  # fmt: skip
    assert after.observation[0]["content"] == "4"
    assert (found.failed_calls, after.failed_calls) == (1, 0)


def test_wrong_calls_are_counted(playing):
    wrong = call("sub", {}) + call("add", {"a": 1, "b": 2}) + "<tool_call>{"
    mixed, right, last = acted(playing, wrong, call("add", {"a": 1, "b": 2}), "It is 3.")
    assert [m["content"][:6] for m in mixed.observation] == ["error:", "3", "error:"]
    assert (mixed.failed_calls, right.failed_calls, last.failed_calls) == (2, 0, 0)


@pytest.mark.parametrize(
    ("action", "beginning"),
    [
        ("<tool_call>{", "error: the call cannot be read: it is not JSON: Expecting"),
        (call("sub", {}), "error: there is no tool 'sub'; there are add, keep, shaped, do"),
        (call("x" * 5000, {}), "error: there is no tool 'xxxx"),
        (call("add", {}), "error: add was not called: arguments: 'a' is a required property"),
        (call("add", {"a": "1"}), "error: add was not called: a: '1' is not of type 'integer'"),
        (call("add", {"a": True}), "error: add was not called: a: True is not of type"),
        (call("add", {"a": 1, "c": 2}), "error: add was not called: arguments: Additional proper"),
        (call("add", [1, 2]), "error: add was not called: arguments: [1, 2] is not of type 'obj"),
        (call("add", None), "error: add was not called: arguments: None is not of type 'object'"),
        (call("add", {"a": "x\n" * 10**6}), "error: add was not called: a: 'x"),
        (call("shaped", {"unit": "K", "where": {}}), "error: shaped was not called: unit: 'K' is"),
        (call("shaped", {"unit": "C", "where": {"p": [1, "2"]}}), "error: shaped was not called: "),
        (call("do", {"what": "raise"}), "error: RuntimeError: no such thing thing"),
        (call("do", {"what": "raise_badly"}), "error: RuntimeError: <exception str() failed>"),
        (call("do", {"what": "exit"}), "error: SystemExit: 3"),
        (call("do", {"what": "interrupt"}), "error: KeyboardInterrupt"),
        (call("do", {"what": "recursive"}), "error: ValueError: Circular reference detected"),
        (call("do", {"what": "bad_text"}), "error: RuntimeError: no text"),
        (call("do", {"what": "absent"}), "error: KeyError: 'absent'"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(playing, action, beginning):
    (content,) = contents(playing, action)
    assert content.startswith(beginning), content
    assert "\n" not in content and len(content) <= MAX_ERROR_CHARACTERS


@pytest.mark.parametrize(
    ("what", "result"),
    [
        ("text", "plain <tool_call>"),
        ("none", "null"),
        ("true", "true"),
        ("float", "0.5"),
        ("dict", '{"a": [1, null, "é"], "t": "2026-01-02"}'),
        ("tuple", "[1, 2]"),
        ("bytes", "café \ufffd"),
        ("object", "2026-01-02"),
        ("numpy", "0.25"),
        ("array", '{"x": [0, 1, 2], "y": 7}'),
        ("half", "?"),
        ("long", "x" * (LIMIT - len(CUT)) + CUT),
        ("print", "printed"),
    ],
)
def test_results_are_text(playing, what, result):
    assert contents(playing, call("do", {"what": what})) == [result]


def test_nested_arguments_arrive_as_they_are(playing):
    where = {"a }</tool_call>{": [1.5, 2], "\u2028\\": []}
    arguments = {"unit": "F", "where": where, "when": None}
    assert contents(playing, call("shaped", arguments)) == [json.dumps(["F", where, None])]


def test_a_megabyte_of_arguments(playing):
    (content,) = contents(playing, call("keep", {"x": "y\n" * 500_000}))
    assert content == "1"
    many = {f"k{i}": [1.0] * 10 for i in range(10_000)}
    (content,) = contents(playing, call("shaped", {"unit": "C", "where": many}))
    assert content.startswith('["C", {"k0": [1.0') and content.endswith(CUT)


@pytest.mark.parametrize(
    ("what", "note"),
    [
        ("hang", "more than 60 seconds"),
        ("vanish", "its process died"),
        ("fill", "more than 0.4 GB of memory"),
    ],
)
def test_what_ends_an_episode_ends_it_alone(playing, what, note, monkeypatch):
    limits.limit(monkeypatch, 1.0, "hang")
    playing.begin("beside", Problem(""), 0)
    answers(playing, "beside")
    (played,) = acted(playing, call("do", {"what": what}))
    assert played.failed and played.note == note
    playing.act("beside", call("add", {"a": 1}))
    assert answers(playing, "beside")["beside"].observation[0]["content"] == "2"
    playing.end("beside")


def test_llama3_json_and_a_parser_of_ones_own():
    llama = {"tools": [f"{MODULE}:add"], "parser": "llama3_json"}
    own = {"tools": [f"{MODULE}:do"], "parser": f"{MODULE}:xml"}
    for options, action, results in (
        (llama, '{"name": "add", "parameters": {"a": 2}}', ["3"]),
        (own, "<do>none</do><do>true</do>", ["null", "true"]),
    ):
        with started(TOOLS, options, name="tools") as playing:
            assert contents(playing, action) == results
            assert acted(playing, "Done.")[0].done


def test_schemas_reach_the_run(playing):
    schemas = playing.schemas()
    assert [schema["function"]["name"] for schema in schemas] == ["add", "keep", "shaped", "do"]
    assert schemas[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The one."},
                    "b": {"type": "integer", "description": "The other."},
                },
                "required": ["a"],
            },
            "return": {"type": "integer"},
        },
    }


def test_an_environment_without_tools_has_no_schemas():
    environment = "tests.environments.own_environments:GuessTheNumber"
    with started(environment) as playing:
        assert playing.schemas() == []


class OwnSchemas:
    """An environment that has schemas of its own."""

    def __init__(self, found):
        self.found = found

    def schemas(self):
        return self.found

    def reset(self, problem, seed):
        pass

    def step(self, action):
        pass


@pytest.mark.parametrize("kind", ["class", "object"])
def test_an_environment_of_ones_own_may_have_schemas(kind):
    def schemas(found):
        given, options = (
            (OwnSchemas, {"found": found}) if kind == "class" else (OwnSchemas(found), {})
        )
        with started(given, options) as playing:
            return playing.schemas()

    assert schemas([{"name": "f"}]) == [{"name": "f"}]
    with pytest.raises(ConfigError, match="schemas returned 'f', not a list of dicts"):
        schemas("f")
    with pytest.raises(ConfigError, match="set is not JSON serializable"):
        schemas([{"name": set()}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": []}, r"tools=\[\] must be a list of one tool at least"),
        ({"tools": "calculator"}, "tools='calculator' must be a list"),
        ({"tools": ["search"]}, "the tool search: it is none of calculator, python, nor module:"),
        ({"tools": [f"{MODULE}:absent"]}, "has no attribute 'absent'"),
        ({"tools": [f"{MODULE}:add", f"{MODULE}:add"]}, "two tools of the name add"),
        ({"tools": [f"{MODULE}:not_a_function"]}, "not_a_function: 5 is not a function"),
        ({"tools": [f"{MODULE}:no_docstring"]}, "no_docstring: .* has no docstring"),
        ({"tools": [f"{MODULE}:no_hint"]}, "no_hint: Argument a is missing a type hint"),
        ({"tools": [f"{MODULE}:no_description"]}, "no description for the argument 'b'"),
        ({"tools": [f"{MODULE}:odd_hint"]}, r"odd_hint: .*parse this type hint.*set\[int\]"),
        ({"tools": [f"{MODULE}:unknown_hint"]}, "name 'NoSuchType' is not defined"),
        ({"tools": [f"{MODULE}:any_number"]}, r"its parameter \*a: int has no name"),
        ({"tools": [f"{MODULE}:later"]}, "later: it is async"),
        ({"tools": ["calculator"], "parser": "qwen"}, "parser=qwen must be one of hermes, llama3"),
        ({"tools": ["calculator"], "max_calls": 0}, "max_calls=0 must be a whole number from 1"),
        ({"tools": ["calculator"], "max_calls": 100}, "max_calls=100 must be a whole number"),
        ({"tools": ["calculator"], "max_result_characters": 1.5}, "max_result_characters=1.5"),
        ({"tools": ["calculator"], "python": {"seconds": 1}}, "python has options, but"),
        ({"tools": ["python"], "python": {"seconds": 0}}, "python.seconds=0 must be a number"),
        ({"tools": ["python"], "python": {"second": 1}}, "unexpected keyword argument 'second'"),
        ({"tools": ["python"], "python": {"modules": ["no_such"]}}, "No module named 'no_such'"),
    ],
)
def test_what_is_refused_at_loading(options, message):
    with pytest.raises((ValueError, TypeError, AttributeError, SandboxUnavailable), match=message):
        Tools(**options)


def test_what_is_refused_is_the_users_mistake():
    due = (
        "tools cannot be loaded: ValueError: the tool .*no_hint: Argument a is missing a type hint"
    )
    no_hint = {"tools": [f"{MODULE}:no_hint"]}
    with started(TOOLS, no_hint, name="tools") as playing:
        with pytest.raises(ConfigError, match=due):
            playing.check()


def test_results_and_arguments_without_a_process():
    """What the cases above have beyond their processes, for a quick look at a fault."""
    assert Tools([own_tools.add]).step("none").done
    assert result_text(float("inf")) == "Infinity"
    tool = Tool(own_tools.shaped)
    assert tool.mistake({"unit": "C", "where": {}, "when": None}) == ""
    assert tool.mistake({"unit": "C", "where": {}, "when": 1}).startswith("when: 1 is not")


def test_tools_load_without_torch():
    code = """
        from vapo_megatron.environments.tools import Tools
        Tools(["calculator", "python"]).schemas()
    """
    assert loaded_by(code, ("torch",)) == []
