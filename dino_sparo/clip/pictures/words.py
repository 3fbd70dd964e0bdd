"""A caption and its token ids -> its words, and how much of a slot's attention each of them gets.

The tokenizer cuts words into pieces and marks the last piece of each; a word is what lies between two marks. Its words
are those of the caption as written, but punctuation stands alone, and so do endings after an apostrophe.
"""

import html
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

from dino_sparo.image_text.text import simple_tokenizer

END_OF_WORD = "</w>"


class Word(NamedTuple):
    """A word of a caption.

    Attributes:
        text: as the caption has it; where the tokenizer changed more than its case, as the tokenizer has it.
        has_space: whether a space precedes it.
        first: place of its first token; the start token is 0.
        end: place after its last token.
    """

    text: str
    has_space: bool
    first: int
    end: int


class WordAttention(NamedTuple):
    """How slots share their attention among the words of one caption; a slot's shares sum to one.

    Attributes:
        words: (L, words), shares of the words.
        start: (L,), of the start token.
        end: (L,), of the end token.
    """

    words: Float[np.ndarray, "L words"]
    start: Float[np.ndarray, " L"]
    end: Float[np.ndarray, " L"]


def caption_words(caption: str, token_ids: Int64[Tensor, " N"]) -> list[Word]:
    """The words of a caption that the model sees; of one that was cut off, those before the cut.

    Args:
        caption: as written.
        token_ids: (N,), of `tokenize`: start token, pieces of words, end token, zeros.
    """
    tokenizer = simple_tokenizer()
    pieces = [tokenizer.decoder[number] for number in token_ids[1 : int(token_ids.argmax())].tolist()]
    written, cursor = html.unescape(html.unescape(caption)), 0
    words: list[Word] = []
    first, joined = 0, ""
    for index, piece in enumerate(pieces):
        joined += piece.removesuffix(END_OF_WORD)
        if not piece.endswith(END_OF_WORD) and index + 1 < len(pieces):
            continue
        text = bytearray(tokenizer.byte_decoder[letter] for letter in joined).decode("utf-8", "replace")
        start = len(written) - len(written[cursor:].lstrip())
        has_space = start > cursor
        if written[start : start + len(text)].lower() == text:
            text, cursor = written[start : start + len(text)], start + len(text)
        else:
            has_space = True
        words.append(Word(text, has_space and bool(words), first + 1, index + 2))
        first, joined = index + 1, ""
    return words


def word_attention(
    attention: Float[np.ndarray, "L N"], words: list[Word], token_ids: Int64[Tensor, " N"]
) -> WordAttention:
    """The attention of tokens, merged to words.

    Args:
        attention: (L, N), of one caption.
        words: of `caption_words`.
        token_ids: (N,), of the same caption.
    """
    shares = [attention[:, word.first : word.end].sum(axis=1) for word in words]
    merged = np.stack(shares, axis=1) if shares else np.zeros((len(attention), 0), attention.dtype)
    return WordAttention(merged, attention[:, 0], attention[:, int(token_ids.argmax())])
