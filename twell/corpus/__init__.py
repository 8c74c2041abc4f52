"""Text to tokens: documents of a source, a byte-level BPE, and blocks of a fixed length.

The order of the training blocks is a pure function of the seed and of the number of blocks drawn
so far, so a position in the data is one integer. That of a stream is the state of its reader.
The public names load at first use.
"""

from twell.lazy import hand_on

__getattr__, __dir__, __all__ = hand_on(
    __name__,
    {
        ".sources": "HOLD_OUT_EVERY checked_text continuations documents last_words split",
        ".tokens": "Corpus END_OF_TEXT beginning encode load_tokenizer prepare read_tokenizer "
        "train_tokenizer",
        ".blocks": "Blocks Stream",
    },
)
