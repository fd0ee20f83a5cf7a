"""What a tokenizer puts around a text, or cuts off it.

Not exercised: tokenizers of sentencepiece (test_tokenizer.py).
"""

import pytest

from tests.rollout.chat_tokenizer import CHATML, write_chat_tokenizer
from vapo_megatron.data.problems import Problem
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.errors import ConfigError
from vapo_megatron.rollout.special_tokens import begin_of
from vapo_megatron.rollout.tokenizer import load_tokenizer

ASKED = [{"role": "user", "content": "1 + 1 = ?"}]
WRITTEN = "<|im_start|>user\n1 + 1 = ?<|im_end|>\n<|im_start|>assistant\n"


def dataset_of(tokenizer, *texts, **more):
    kept = dict(path="f", seed=0, shuffle=False, max_prompt_tokens=9999, **more)
    return PromptDataset([Problem(text) for text in texts], tokenizer.encode, **kept)


@pytest.mark.parametrize("around", ["$A <|endoftext|>", "<|bos|> $A <|im_end|> <|endoftext|>"])
def test_a_token_behind_every_text_is_refused(tmp_path, around):
    write_chat_tokenizer(tmp_path, around)
    names = around.partition("$A ")[2]
    with pytest.raises(ConfigError) as error:
        load_tokenizer(tmp_path)
    assert f"model.hf_path={tmp_path}: its tokenizer appends {names!r} to every" in str(error.value)
    assert "post_processor in tokenizer.json" in str(error.value)


@pytest.mark.parametrize("around", ["$A", "<|bos|> $A", "<|bos|> <|im_start|> $A"])
def test_tokens_before_a_text_are_taken(tmp_path, around):
    load_tokenizer(write_chat_tokenizer(tmp_path, around))


def test_a_text_is_neither_cut_nor_padded(tmp_path):
    """tokenizer.json may say so, as some do that were saved in the middle of training."""
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path, cut_at=16))
    data = dataset_of(tokenizer, "1", "x" * 100)
    assert [len(data.tokens(i)) for i in (0, 1)] == [1, 100]


def test_a_prompt_begins_once(tmp_path):
    """Texts of apply_chat_template have the begin token, and encoding adds another."""
    path = write_chat_tokenizer(tmp_path, "<|bos|> $A", "{{ bos_token }}" + CHATML)
    tokenizer = load_tokenizer(path)
    text = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|>" + WRITTEN and tokenizer.decode(tokenizer.encode(text)) != text
    data = dataset_of(tokenizer, text, WRITTEN, "<|bos|>" + text, "<|bos|>")
    decoded = [tokenizer.decode(data.tokens(i)) for i in range(4)]
    assert decoded == [text, text, text, "<|bos|>"] and data.num_double_begin == 3


def test_a_begin_token_that_encoding_does_not_add_is_kept_once(tmp_path):
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path, bos_token="<|bos|>"))
    data = dataset_of(tokenizer, "<|bos|><|bos|>1", "<|bos|>1", "11", begin=begin_of(tokenizer))
    assert [tokenizer.decode(data.tokens(i)) for i in range(3)] == ["<|bos|>1", "<|bos|>1", "11"]
    assert data.num_double_begin == 1
    plain = load_tokenizer(write_chat_tokenizer(tmp_path / "b"))
    assert begin_of(plain) == [] and len(dataset_of(plain, "11").tokens(0)) == 2
