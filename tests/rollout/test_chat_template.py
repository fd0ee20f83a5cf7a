"""Chat templates that write tools, a row's variables and the date, or do not.

Not exercised: templates of published models, which the network has.
"""

import datetime

import pytest

from tests.rollout.chat_tokenizer import CHATML, write_chat_tokenizer
from tests.rollout.family_templates import QWEN3
from vapo_megatron.errors import DataError
from vapo_megatron.rollout.tokenizer import ChatTemplate, load_tokenizer

USER = {"role": "user", "content": "1 + 1 = ?"}
CALL = {"name": "add", "arguments": {"a": 1}}
CALLED = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
          {"role": "tool", "content": "2"}]  # fmt: skip
TOOL = {"name": "add", "parameters": {}}
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c | tojson }}{% endfor %}{% endfor %}"
    "{% if not (enable_thinking | default(true)) %}<think></think>{% endif %}"
)
# As Llama 3.2 and Granite have it, and Llama 3.1, whose constant stands for templates of its time.
DATED = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '1 Jul 2024' %}"
    "{% endif %}{% endif %}{{ 'Today: ' + date_string + '\n' }}"
)
SAID = "{{ messages[0].content }}"
UNDATED = "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"


def template_of(path, template, date=None):
    return ChatTemplate(load_tokenizer(write_chat_tokenizer(path, template=template)), date)


def test_tools_calls_and_variables_are_written(tmp_path):
    template = template_of(tmp_path, WITH_TOOLS)
    assert template([USER], tools=[TOOL]) == '[{"name": "add", "parameters": {}}]1 + 1 = ?'
    assert template(CALLED) == '1 + 1 = ?{"name": "add", "arguments": {"a": 1}}2'
    assert template([USER], variables={"enable_thinking": False}).endswith("<think></think>")
    assert template([USER], variables={"enable_thinking": True}) == template([USER])
    assert template.date is None


TRIMMED = CHATML.replace("m['content']", "m['content'] | trim")
LAST_IS_LOST = CHATML.replace("for m in messages", "for m in messages if m['role'] == 'user'")


@pytest.mark.parametrize(
    ("form", "text"), [(CHATML, "Let me see: "), (TRIMMED, "Let me see:"), (QWEN3, "Let me see: ")]
)
def test_a_response_continues_an_assistants_message(tmp_path, form, text):
    begun = [USER, {"role": "assistant", "content": "Let me see: "}]
    prompt = template_of(tmp_path, form)(begun)
    assert prompt == f"<|im_start|>user\n1 + 1 = ?<|im_end|>\n<|im_start|>assistant\n{text}"


def test_a_response_follows_a_tools_answer(tmp_path):
    answered = [USER, {"role": "tool", "content": "2"}]
    assert template_of(tmp_path, QWEN3)(answered).endswith(
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (LAST_IS_LOST, ([USER, {"role": "assistant", "content": "a"}],), "refuses them: continue_"),
        (CHATML, ([USER], (), {"continue_final_message": True}), "is not a row's to set"),
        (CHATML, ([USER], [TOOL]), "chat template does not write the tools given to it"),
        (CHATML + "{# tools #}", ([USER], [TOOL]), "does not write the tools given to it"),
        (CHATML, (CALLED,), "does not write the tool_calls of message 1"),
        (
            WITH_TOOLS.replace("{{ m['content'] }}", "{{ m['content'] if m['role'] == 'user' }}"),
            (CALLED,), "does not write the tool's answer of message 2",
        ),
        (LAST_IS_LOST, ([{"role": "system", "content": "Be brief."}, USER],),
         "does not write the system's text of message 0"),
        (CHATML.replace("for m in messages", "for m in messages[-1:]"),
         ([USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Why?"}],),
         "does not write the user's text of message 0"),
        (CHATML, ([USER], (), {"thinking": 1}), "has thinking, which the .* template does not use"),
        (CHATML, ([USER], (), {"tokenize": True}), "sets tokenize, which is not a row's to set"),
        (CHATML, ([USER], (), {"messages": []}), "sets messages, which is not a row's to set"),
        (DATED, ([USER], (), {"strftime_now": "x"}), "sets strftime_now, which is not a row's"),
        (CHATML, ([USER], (), {"eos_token": "x"}), "sets eos_token, which is not a row's to set"),
    ],
)  # fmt: skip
def test_what_a_template_does_not_write_is_named(tmp_path, template, row, message):
    with pytest.raises(DataError, match=message):
        template_of(tmp_path, template)(*row)


def test_a_date_is_told_and_kept(tmp_path):
    template = template_of(tmp_path, DATED + CHATML, "2024-02-29")
    assert template.date is None
    assert template([USER]).startswith("Today: 29 Feb 2024\n") and template.date == "2024-02-29"
    today = template_of(tmp_path, DATED + CHATML)
    today([USER])
    assert datetime.date.fromisoformat(today.date) <= datetime.date.today()


def test_the_time_of_day_is_midnight(tmp_path):
    template = template_of(
        tmp_path, "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}" + SAID, "2024-02-29"
    )
    assert template([USER]) == "2024-02-29 00:00:00.0000001 + 1 = ?"


def test_a_constant_date_and_a_rows_own_are_no_clock(tmp_path):
    template = template_of(tmp_path, UNDATED + "{{ date_string }}" + SAID, "2024-02-29")
    assert template([USER]) == "26 Jul 20241 + 1 = ?"
    assert template([USER], variables={"date_string": "1 Jan 2020"}) == "1 Jan 20201 + 1 = ?"
    assert template.date is None


def test_what_is_left_out_is_looked_for_once_for_each_shape_of_messages(tmp_path, monkeypatch):
    """A text may be written alone and left out beside a call, as in Llama 3.1's template."""
    form = (
        "{% for m in messages %}{% for c in m['tool_calls'] or [] %}{{ c | tojson }}{% else %}"
        "{{ m['content'] }}{% endfor %}{% endfor %}"
    )
    template, rendered = template_of(tmp_path, form), []
    written = template.written
    monkeypatch.setattr(template, "written", lambda *a, **o: rendered.append(1) or written(*a, **o))
    said = {"role": "assistant", "content": "2"}
    for question, count in (("1 + 1", None), ("2 + 2", 1), ("3 + 3", 1)):
        rendered.clear()
        assert template([{**USER, "content": question}, said, USER]).startswith(question)
        assert count in (None, len(rendered))
    with pytest.raises(DataError, match="does not write the assistant's text of message 1"):
        template([USER, {**said, "tool_calls": [CALL]}, USER])
