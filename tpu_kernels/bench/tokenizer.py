"""A byte-level tokenizer for the small models of `presets`: one token a byte of UTF-8, for any text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BYTES = 256
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
PAD_ID, BOS_ID, EOS_ID = BYTES, BYTES + 1, BYTES + 2

# Like released models, the embedding has more rows than the tokenizer has tokens: a multiple of 64.
VOCAB_SIZE = 320


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer: id 0-255 is that byte, then padding, begin and end of text.

    It adds no special tokens by itself, and undoes itself exactly:

        >>> tokenizer = build_tokenizer()
        >>> tokenizer("Hé").input_ids
        [72, 195, 169]
        >>> tokenizer.decode([72, 195, 169])
        'Hé'
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    # By default the text is first cut into words, which a vocabulary without merges has no use for.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, BOS, EOS])  # in the order of their ids
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _byte_vocabulary() -> dict[str, int]:
    """`tokenizers`' printable stand-in for each byte, with the byte as its id.

    Its byte-level alphabet is GPT-2's: printable Latin-1 characters stand for themselves, and the other
    bytes, in order, are the characters from U+0100 on.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    vocabulary: dict[str, int] = {}
    stand_ins = 0
    for byte in range(BYTES):
        if byte in printable:
            vocabulary[chr(byte)] = byte
        else:
            vocabulary[chr(BYTES + stand_ins)] = byte
            stand_ins += 1
    return vocabulary
