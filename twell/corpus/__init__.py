"""Text to tokens: documents of a source, a byte-level BPE, and blocks of a fixed length.

    sources     documents of files and packages, and which are held out for validation
    tokens      tokenizers, and tokenised text in a cache
    blocks      `Blocks` in an order that the seed fixes, and `Stream` of a data set of the hub

The order of the training blocks is a pure function of the seed and of the number of blocks drawn
so far, so a position in the data is one integer. That of a stream is the state of its reader.
This folder imports nothing else of ours. The public names load at first use.
"""

import importlib

_MODULES = {
    "sources": "HOLD_OUT_EVERY NO_SOTU SUFFIXES checked_text documents source_files split",
    "tokens": "CHECKSUMS Corpus ENCODED_TOGETHER END_OF_TEXT load_tokenizer prepare "
    "train_tokenizer",
    "blocks": "Blocks Stream",
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_NAMES)


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
