"""A byte-level tokenizer with ChatML, as published ones are: 0 ends a text, 2 a turn, 3 begins."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>")
SIZE = len(SPECIAL) + 256


def write_chat_tokenizer(
    directory: Path, around: str = "$A", template: str | None = CHATML, cut_at: int = 0, **more: Any
) -> Path:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        around: what encoding puts around a text, $A, as a post-processor's template.
        template: of chats.
        cut_at: tokens at which tokenizer.json says that texts are cut, and padded to; 0: nowhere.
        more: of tokenizer_config.json.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=SIZE, initial_alphabet=alphabet, special_tokens=list(SPECIAL),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[(token, i) for i, token in enumerate(SPECIAL)]
    )
    if cut_at:
        tokenizer.enable_truncation(cut_at)
        tokenizer.enable_padding(length=cut_at, pad_id=0, pad_token=SPECIAL[0])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0], "chat_template": template,
    }  # fmt: skip
    if "<|bos|>" in around:
        config["bos_token"] = "<|bos|>"
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, **more}))
    return directory
