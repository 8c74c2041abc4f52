"""Small tokenizers of every kind, trained on a few sentences."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

TEXT = "the cat sat on the mat. a a cat's mats, don't you see? tokens <fire> in layers for wört"
END = "<end>"
ByteLevel = pre_tokenizers.ByteLevel


def _trained(model, trainer, before, decoder, **options):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = before, decoder
    special = ["<unk>", END]
    trainer = trainer(special_tokens=special, show_progress=False, **options)
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    return _wrapped(tokenizer)


def _wrapped(tokenizer):
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, unk_token="<unk>"
    )


def byte_level():
    letters = {"initial_alphabet": ByteLevel.alphabet(), "vocab_size": 300}
    before, decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return _trained(models.BPE(), trainers.BpeTrainer, before, decoder, **letters)


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
    return _wrapped(tokenizer)


def words():
    """Whole words, which no decoder joins."""
    model, before = models.WordLevel(unk_token="<unk>"), pre_tokenizers.WhitespaceSplit()
    tokenizer = _trained(model, trainers.WordLevelTrainer, before, decoders.Fuse())
    tokenizer.backend_tokenizer.decoder = None
    return tokenizer


class Slow(PreTrainedTokenizer):
    """Characters, in plain Python."""

    def __init__(self, **options):
        super().__init__(eos_token=END, **options)

    def get_vocab(self):
        return {chr(number): number for number in range(1000)} | self.added_tokens_encoder

    vocab_size = 1000

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


KINDS = [byte_level, sentencepiece, words, Slow]
