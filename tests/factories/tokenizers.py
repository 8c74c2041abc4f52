"""Small tokenizers of both kinds: of bytes, and of sentencepiece."""

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from twell import corpus

TEXT = "the cat sat on the mat. a a cat's mats, don't you see? tokens <fire> in layers for wört"
END = corpus.END_OF_TEXT


def byte_level():
    return corpus.train_tokenizer([TEXT] * 5, 300)


def sentencepiece():
    """As of Llama 2: spaces are ▁, and characters that are no token become bytes."""
    letters = ["▁", *sorted(set(TEXT) - {" ", "ö"}), "▁a", "▁<", "at"]
    names = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab = {name: number for number, name in enumerate(names)}
    merges = [("▁", "a"), ("▁", "<"), ("a", "t")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    start = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(start)
    ends = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *ends])
    tokenizer.add_special_tokens(["<unk>", END])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, unk_token="<unk>"
    )


KINDS = [byte_level, sentencepiece]
