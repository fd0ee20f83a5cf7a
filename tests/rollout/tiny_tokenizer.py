"""A word-level tokenizer of `size` tokens beside a tiny model: id 2 ends a response."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>"]
ANSWERS = ("Answer: 7", "Answer: 8")


def write_tiny_tokenizer(
    directory: Path, size: int = 64, eos: bool = True, last: Sequence[str] = ()
) -> None:
    """Write tokenizer.json and tokenizer_config.json; the words are w3, w4, ..., and the last."""
    words = [*SPECIAL, *(f"w{i}" for i in range(3, size - len(last))), *last]
    write_words(directory, words, eos=eos)


def write_words(
    directory: Path,
    words: Sequence[str],
    split: PreTokenizer | None = None,
    eos: bool = True,
) -> Path:
    """Write the files of a tokenizer of these words, SPECIAL first, split at spaces by default."""
    vocabulary = {w: i for i, w in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split or pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>" if eos else None
    )
    fast.save_pretrained(directory)
    return directory
