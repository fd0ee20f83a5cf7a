"""The tiny task's tokenizer, trained by sentencepiece and saved with the same ids for transformers.

Next to a qwen2 config.json, transformers always loads a Qwen2Tokenizer (byte-level BPE), whatever
class tokenizer_config.json names, and ignores tokenizer.model. The directory therefore has both:
sentencepiece's tokenizer.model, and a Qwen2Tokenizer with the same pieces and ids and no merges.
Every piece is one ASCII character, which byte-level BPE maps to itself, except added tokens such as
`Answer:`.

Characters outside the task's alphabet become `<unk>` in sentencepiece; transformers drops them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
import task
from transformers import AddedToken, Qwen2Tokenizer

UNKNOWN, STOP = "<unk>", "<|endoftext|>"


def train_pieces(characters: str, added: Sequence[str]) -> bytes:
    """Train a character model and return the bytes of its tokenizer.model.

    Args:
        characters: each becomes a piece.
        added: strings that become one piece each.

    Ids: 0 unknown, 1 stop, then the added ones and the characters. No normalisation, no prefix
    space.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([characters]),
        model_writer=model,
        model_type="char",
        vocab_size=len(characters) + len(added) + 2,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        byte_fallback=False,
        unk_id=0,
        unk_piece=UNKNOWN,
        eos_id=1,
        eos_piece=STOP,
        bos_id=-1,
        pad_id=-1,
        user_defined_symbols=list(added),
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def save_tokenizer(
    directory: Path,
    max_tokens: int,
    characters: str = task.SHORT.characters,
    added: Sequence[str] = (task.ANSWER_MARKER,),
) -> Qwen2Tokenizer:
    """Write tokenizer.model, tokenizer.json and tokenizer_config.json; return the transformers one.

    Args:
        directory: created if missing.
        max_tokens: the model's longest sequence.
        characters, added: of the task, see train_pieces.
    """
    trained = train_pieces(characters, added)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=trained)
    tokenizer = Qwen2Tokenizer(
        vocab={pieces.id_to_piece(i): i for i in range(pieces.vocab_size())},
        merges=[],
        unk_token=UNKNOWN,
        eos_token=STOP,
        pad_token=STOP,
        model_max_length=max_tokens,
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    assert len(tokenizer) == pieces.vocab_size(), "transformers added ids that are no pieces"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.model").write_bytes(trained)
    tokenizer.save_pretrained(directory)
    return tokenizer
