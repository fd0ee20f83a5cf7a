"""Loading tokenizers and finding stop tokens.

Does not exercise: models on the hub (no network in tests), real Qwen2.5 vocabularies.
"""

import json
import random
from array import array

import pytest
import sentencepiece

from tests.rollout.tiny_tokenizer import write_tiny_tokenizer
from tests.weights.tiny_hf import write_tiny_hf, write_tiny_model
from vapo_megatron.errors import ConfigError
from vapo_megatron.rollout.tokenizer import (
    check_same_tokenizer,
    check_tokenizer,
    decode_responses,
    load_tokenizer,
)
from vapo_megatron.weights.hf_directory import copy_settings, note_export


class NoEos:
    """Stands for a tokenizer without an end-of-sequence token."""

    eos_token_id = None

    def get_vocab(self):
        return {f"w{i}": i for i in range(64)}


def _write(path, name, **content):
    (path / name).write_text(json.dumps(content))


def test_round_trip_without_special_tokens_in_the_text(tmp_path):
    write_tiny_model(tmp_path, vocab=64)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("w9 w10") == [9, 10]
    # The stop token (2) is in the response, not in its text.
    responses = [array("i", ids) for ids in ((9, 10, 2), (3,), (2,))]
    assert decode_responses(tokenizer, responses) == ["w9w10", "w3", ""]


def test_a_directory_without_a_vocabulary_is_refused(tmp_path):
    write_tiny_hf(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer.*tokenizer.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "a/b/c"])
def test_a_missing_directory_is_refused(path):
    with pytest.raises(ConfigError, match="no such directory"):
        load_tokenizer(path)


def test_a_broken_tokenizer_is_refused(tmp_path):
    write_tiny_hf(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="does not load: .*; fetch its tokenizer's files"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=f"^--tokenizer={tmp_path}: its"):
        load_tokenizer(tmp_path, "--tokenizer")


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    write_tiny_model(tmp_path, vocab=64)
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    file.write_text(json.dumps(config))
    load_tokenizer(tmp_path)
    assert not marker.exists()


def _sentencepiece(directory, kind):
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)]
    (directory / "text").write_text(
        "\n".join(" ".join(rng.choices(words, k=8)) for _ in range(300))
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text"), model_prefix=str(directory / "tokenizer"), model_type=kind,
        vocab_size=45, minloglevel=2, eos_id=1, bos_id=-1, unk_id=0,
        normalization_rule_name="identity",
    )  # fmt: skip
    llama = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "legacy": False}
    _write(directory, "tokenizer_config.json", eos_token="</s>", **llama)
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))


def test_the_ids_of_sentencepiece_pass(tmp_path):
    model = _sentencepiece(tmp_path, "bpe")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("abc def") == model.EncodeAsIds("abc def")


def test_a_unigram_model_that_transformers_reads_as_bpe_is_refused(tmp_path):
    _sentencepiece(tmp_path, "unigram")
    with pytest.raises(ConfigError, match="tokenizer.model: LlamaTokenizer.*other ids"):
        load_tokenizer(tmp_path)


def test_pieces_numbered_anew_are_refused(tmp_path):
    write_tiny_model(tmp_path, vocab=64)
    _sentencepiece(tmp_path, "bpe")
    with pytest.raises(ConfigError, match="tokenizer.model: .*other ids"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_must_be_the_models(tmp_path):
    write_tiny_tokenizer(tmp_path, 64)
    tokenizer = load_tokenizer(tmp_path)
    assert check_tokenizer(tmp_path, tokenizer, [], 64) == (2,)
    assert check_tokenizer(tmp_path, tokenizer, [], 1000) == (2,), "a vocabulary may be padded"
    with pytest.raises(ConfigError, match=r"token id 63 \('w63'\), outside .*vocab_size=63; put"):
        check_tokenizer(tmp_path, tokenizer, [], 63)
    _write(tmp_path, "config.json", eos_token_id=[2, 64])
    with pytest.raises(ConfigError, match="config.json has eos_token_id=64, which its tokenizer"):
        check_tokenizer(tmp_path, tokenizer, [], 1000)
    assert check_tokenizer(tmp_path, tokenizer, [5], 1000) == (5,)


def test_stop_tokens_of_all_three_places_count(tmp_path):
    write_tiny_tokenizer(tmp_path)  # eos 2
    _write(tmp_path, "generation_config.json", eos_token_id=[5, 7])
    _write(tmp_path, "config.json", eos_token_id=6)
    assert check_tokenizer(tmp_path, load_tokenizer(tmp_path), [], 64) == (2, 5, 6, 7)
    assert check_tokenizer(tmp_path, NoEos(), [], 64) == (5, 6, 7)


def test_configured_stop_tokens_replace_the_others(tmp_path):
    _write(tmp_path, "generation_config.json", eos_token_id=5)
    assert check_tokenizer(tmp_path, NoEos(), [9, 3], 64) == (3, 9)


def test_an_export_stops_where_its_run_stopped(tmp_path):
    """The tokenizer (2) and config.json (6) name others, which the policy never stopped at."""
    write_tiny_tokenizer(tmp_path)
    _write(tmp_path, "config.json", eos_token_id=6, bos_token_id=1, pad_token_id=0)
    out = tmp_path / "out"
    out.mkdir()
    copy_settings(tmp_path, out, "qwen2", "actor", None, [7, 5, 7])
    note_export(out, 3, [7, 5])
    written = json.loads((out / "generation_config.json").read_text())
    assert written == {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [5, 7]}
    assert check_tokenizer(out, load_tokenizer(out), [], 64) == (5, 7)
    assert check_tokenizer(out, load_tokenizer(out), [9], 64) == (9,)
    _write(out, "generation_config.json", eos_token_id=8)  # Changed by hand: all places count.
    assert check_tokenizer(out, load_tokenizer(out), [], 64) == (2, 6, 8)


def test_settings_that_agree_are_kept_byte_for_byte(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    _write(tmp_path, "config.json", eos_token_id=6)
    _write(tmp_path, "generation_config.json", eos_token_id=[7, 5], temperature=0.6)
    copy_settings(tmp_path, out, "qwen2", "actor", None, [5, 7])
    name = "generation_config.json"
    assert (out / name).read_bytes() == (tmp_path / name).read_bytes()
    copy_settings(tmp_path, out, "qwen2", "actor", None, [5])
    assert json.loads((out / name).read_text()) == {"eos_token_id": [5], "temperature": 0.6}


def test_no_stop_token_is_a_config_error(tmp_path):
    _write(tmp_path, "config.json", eos_token_id=None)
    with pytest.raises(ConfigError, match="set rollout.stop_token_ids"):
        check_tokenizer(tmp_path, NoEos(), [], 64)


@pytest.mark.parametrize("configured", [[64], [-1]])
def test_stop_tokens_outside_the_vocabulary(tmp_path, configured):
    with pytest.raises(
        ConfigError, match=rf"stop_token_ids: \[{configured[0]}\].*vocabulary of 64"
    ):
        check_tokenizer(tmp_path, NoEos(), configured, 64)


def test_malformed_stop_tokens_name_the_file(tmp_path):
    _write(tmp_path, "generation_config.json", eos_token_id="</s>")
    with pytest.raises(ConfigError, match="generation_config.json: eos_token_id='</s>'"):
        check_tokenizer(tmp_path, NoEos(), [], 64)


WORDS = {f"w{i}": i for i in range(64)}
OTHERS = {
    # file and content: what is wrong with it
    ("vocab.json", "dict"): None,
    ("tokenizer.json", "fewer"): None,
    ("tokenizer.json", "more"): None,
    ("tokenizer.json", "unigram"): None,
    ("tokenizer.json", "another"): "id 7 is 'x', but 'w7'",
    ("vocab.json", "moved"): "id 7 is no token, but 'w7'",
    ("tokenizer.json", "added"): "id 7 is '<pad>', but 'w7'",
    ("tokenizer.json", "broken"): "tokenizer.json is not a vocabulary",
}


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_a_reward_models_ids_are_the_actors(tmp_path, case):
    (name, kind), problem = case, OTHERS[case]
    vocabulary = dict(WORDS)
    if kind in ("fewer", "another", "moved", "added"):
        del vocabulary["w7"]
    vocabulary |= {"more": {"x": 64}, "another": {"x": 7}, "moved": {"w7": 99}}.get(kind, {})
    added = [{"content": "<pad>", "id": 7}] if kind == "added" else []
    model = {"vocab": [[w, -1.0] for w in WORDS] if kind == "unigram" else vocabulary}
    tree = {"added_tokens": added, "model": {} if kind == "broken" else model}
    (tmp_path / name).write_text(json.dumps(vocabulary if name == "vocab.json" else tree))
    if problem is None:
        check_same_tokenizer(NoEos(), str(tmp_path))
        return
    with pytest.raises(ConfigError, match=problem):
        check_same_tokenizer(NoEos(), str(tmp_path))


def test_a_reward_model_without_a_vocabulary_is_taken(tmp_path):
    check_same_tokenizer(NoEos(), str(tmp_path))
