"""What is said of prompts and stop tokens before a run: ends of turns, begin tokens.

Templates are what published models' look like around a turn. Not exercised: where it is printed
(tests/cli/test_user_errors.py).
"""

import pytest

from tests.rollout.chat_tokenizer import CHATML, SPECIAL, write_chat_tokenizer
from tests.rollout.test_special_tokens import WRITTEN, dataset_of
from vapo_megatron.rollout.input_warnings import input_warnings
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.special_tokens import end_of_turn
from vapo_megatron.rollout.tokenizer import load_tokenizer


def turns(user, assistant, asked):
    """A template that writes a user's and an assistant's turns so, and what it asks with."""
    return (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '" + user + "' }}{% else %}{{ '"
        + assistant + "' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '" + asked
        + "' }}{% endif %}"
    ).replace("$", "' + m['content'] + '")  # fmt: skip


TEMPLATES = {
    # template: what ends a turn
    "chatml": (CHATML, "<|im_end|>"),
    "nothing behind a turn": (turns("<|im_start|>$", "<|bos|>$", "<|bos|>"), None),
    "plain text": (turns("Q: $\\n", "A: $\\n", "A:"), None),
    "the end of a text": (turns("[Q] $ ", "$ <|endoftext|>", "[A]"), "<|endoftext|>"),
    "the first of two": (turns("<|im_start|>$", "$<|im_end|>\\n<|bos|>", ""), "<|im_end|>"),
    "refuses": ("{{ raise_exception('no') }}", None),
    "none": (None, None),
}


def tokenizer_of(path, template, **more):
    return load_tokenizer(write_chat_tokenizer(path, template=template, **more))


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_ends_a_turn(tmp_path, name):
    template, token = TEMPLATES[name]
    found = end_of_turn(tokenizer_of(tmp_path, template))
    assert found == (None if token is None else (token, SPECIAL.index(token)))


def warnings_of(tokenizer, stop, *texts, held_out=()):
    held_out = dataset_of(tokenizer, *held_out) if held_out else None
    return input_warnings(
        Inputs(None, tokenizer, stop, dataset_of(tokenizer, *texts), held_out=held_out)
    )


def test_a_turn_that_goes_on_is_said_with_the_field_to_set(tmp_path):
    tokenizer = tokenizer_of(tmp_path, CHATML)
    (line,) = warnings_of(tokenizer, (0,), "1 + 1", WRITTEN)
    assert line == (
        "the chat template ends a turn with <|im_end|> (2), which is no stop token (they are 0): "
        "responses would go on behind it, up to the length limit; set rollout.stop_token_ids=[0,2]"
    )
    assert warnings_of(tokenizer, (0,), "1 + 1", held_out=[WRITTEN]) == [line]
    # It is a stop token, or no prompt is a chat.
    assert warnings_of(tokenizer, (0, 2), WRITTEN) == warnings_of(tokenizer, (0,), "1 + 1") == []
    assert input_warnings(Inputs(None)) == []


def test_stop_tokens_without_the_tokenizers_own_are_told_of(tmp_path):
    tokenizer = tokenizer_of(tmp_path, CHATML)
    assert tokenizer.eos_token_id == 0
    (line,) = warnings_of(tokenizer, (2,), "1 + 1")
    assert line == (
        "the tokenizer's end of a sequence, <|endoftext|> (0), is no stop token (they are 2): "
        "responses that end with it would go on behind it; if yours do, set "
        "rollout.stop_token_ids=[0,2]"
    )
    # Once, where it is also what ends a turn.
    tokenizer = tokenizer_of(tmp_path, TEMPLATES["the end of a text"][0])
    assert len(warnings_of(tokenizer, (2,), "[Q] 1 + 1 [A]")) == 1
    assert warnings_of(tokenizer, (0,), "1 + 1") == []


def test_a_template_without_special_tokens_is_known_by_its_question(tmp_path):
    tokenizer = tokenizer_of(tmp_path, turns("[Q] $ [/Q] ", "$<|im_end|>", "[A]"))
    assert len(warnings_of(tokenizer, (0,), "[Q] 2 + 2 [/Q] [A]")) == 1
    assert warnings_of(tokenizer, (0,), "2 + 2") == []


def test_a_second_begin_token_is_counted(tmp_path):
    tokenizer = tokenizer_of(tmp_path, None, around="<|bos|> $A")
    (line,) = warnings_of(tokenizer, (0,), "<|bos|>1", "2", "<|bos|>3")
    assert line == (
        "f: 2 prompts of 3 start with the begin token, which the tokenizer adds too; the second "
        "is left out"
    )
