from hypothesis import given
from hypothesis import strategies as st

from tpu_kernels.bench.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, build_tokenizer

TOKENIZER = build_tokenizer()


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    ids = TOKENIZER(text, split_special_tokens=True).input_ids
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


@given(st.binary())
def test_every_byte_has_its_id(data: bytes) -> None:
    assert TOKENIZER.decode(list(data)) == data.decode(errors="replace")


def test_special_tokens_follow_the_bytes() -> None:
    assert (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (
        PAD_ID,
        BOS_ID,
        EOS_ID,
    )
    assert len(TOKENIZER) == 259 <= VOCAB_SIZE
    assert TOKENIZER("a<eos>").input_ids == [ord("a"), EOS_ID]


def test_batches_are_padded_on_the_left() -> None:
    assert TOKENIZER(["abc", "d"], padding=True).input_ids == [[97, 98, 99], [PAD_ID, PAD_ID, 100]]
