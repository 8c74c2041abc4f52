"""Write the numbers computed from data/ into the documents: python scripts/claims.py

docs/claims.md and README's table come from `study.paper`, the tables between markers in other pages
from `study.pages`.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pandas as pd

from study import pages, paper
from study.pages import between, markdown
from twell import results

BEGIN, END = "<!-- claims: python scripts/claims.py -->", "<!-- end of claims -->"
TABLE, END_OF_TABLE = "<!-- {}: python scripts/claims.py -->", "<!-- end of {} -->"
INTRODUCTION = """\
<!-- Written by `python scripts/claims.py` from data/claims.yaml and study/paper.py. -->

# Claims

What [the paper](https://arxiv.org/abs/2603.23198) claims, and what we found. Every number of ours is computed from
`data/`, which [data/README.md](../data/README.md) describes. [Lesson 0](lessons/00_paper.md) reads these tables.

| verdict | meaning |
|---|---|
| reproduced | our number supports the claim |
| in part | the direction is the paper's, the size is not, or only some runs agree |
| contradicted | our number speaks against the claim |
| not testable | our models, their conditions, or the noise between seeds cannot tell |
| ours | the paper claims nothing |
| not compared | the two numbers are of different things |

**The rule.** A claim that something changes is reproduced if our change has the paper's direction and exceeds our
interval (±). Where the interval around our change holds both none and the paper's, the claim is not testable. A claim
of no change is reproduced if our change lies within the interval, a claim of no rise if ours is not above it. A bound
("at most 2%") holds if our whole interval lies within it, and is not testable if only a part does. A claim that holds
in more than half of several models, but not in all, is reproduced in part. A number without ± is compared as it is.

{counts}
"""
# README's rows: what; conditions, {} is the note of the first claim; claims; how these are joined.
SUMMARY = [
    (
        "Forward pass, 2B",
        "random weights, 64 x 2,048 tokens, {} of 5,632 neurons",
        ["forward_2b", "energy_2b"],
        "{}, {}",
    ),
    (
        "Training step, 1.5B",
        "random weights, 16 x 2,048 tokens, {}, activations not recomputed",
        ["step_1_5b", "memory_1_5b"],
        "{}, {}",
    ),
    (
        "Decoding one document, 2B",
        "random weights, [CUDA graph](docs/glossary.md#cuda-graph), {}; in brackets with both sides "
        "tuned by the compiler",
        ["decode", "decode_tuned"],
        "{} ({})",
    ),
    ("One layer, forward", "random weights, 131,072 tokens, 29 active", ["layer_large"], "{}"),
    (
        "The same in FP8",
        "the same; against the fastest dense [FP8](docs/benchmarks.md#fp8)",
        ["fp8_large"],
        "{}",
    ),
    (
        "Inactive neurons; change of cross-entropy",
        "paper 1.5B, 5,632 neurons a layer; ours 99 M, {} of 2,112, 3 seeds",
        ["inactive", "price"],
        "{}, {}",
    ),
]


def counts(table: pd.DataFrame) -> str:
    """Return how many comparisons with the paper have each verdict, in words."""
    numbers = table["verdict"].value_counts()
    judged = {name: numbers.get(name, 0) for name in paper.VERDICTS[:4]}
    words = ", ".join(f"{number} {name}" for name, number in judged.items())
    return f"Of {sum(judged.values())} comparisons with the paper: {words}"


def claims_page(table: pd.DataFrame, subjects: dict[str, dict]) -> str:
    """Return the text of docs/claims.md from `paper.table` and data/claims.yaml."""
    parts = [INTRODUCTION.format(counts=f"{counts(table)}.").strip()]
    for subject, about in subjects.items():
        rows = table[table["subject"] == subject]
        printed = rows["paper"] + ("; " + rows["source"]).where(rows["source"] != "", "")
        cells = rows[["claim", "ours", "interval", "seeds", "verdict"]].astype(str)
        cells.insert(1, "paper", printed)
        shown = cells.replace(r"[\\|]", r"\\\g<0>", regex=True).itertuples(index=False)
        parts += [f"## {about['title']}", _wrap(about["conditions"])]
        parts.append(markdown("claim | paper | ours | interval | seeds: | verdict", shown))
        notes = [_wrap(f"- *{row.claim}*: {row.note}.") for row in rows.itertuples() if row.note]
        if notes:
            parts += ["Notes:", "\n".join(notes)]
        evidence = dict.fromkeys(f"`{path}`" for paths in rows["evidence"] for path in paths)
        commands = "\n".join(f"- `{command}`" for command in dict.fromkeys(rows["command"]))
        parts += [_wrap(f"Evidence: {', '.join(evidence)}."), "Commands:", commands]
    return "\n\n".join(parts) + "\n"


def _wrap(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    whole = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, 110, subsequent_indent=indent, **whole)


def summary(table: pd.DataFrame) -> str:
    """Return README's table, and how many comparisons hold, from `paper.table`."""
    by_name, rows = table.set_index("name"), []
    for what, conditions, names, joined in SUMMARY:
        some = by_name.loc[names]
        note, _, _ = some["note"].iloc[0].partition(";")
        ours = joined.format(*(some["ours"] + " " + some["interval"]).str.strip())
        printed = "–" if (some["paper"] == "–").all() else joined.format(*some["paper"])
        rows.append((what, conditions.format(note), printed, ours))
    shown = markdown(" | conditions | paper (H100) | ours (H200)", rows)
    return f"{shown}\n\n{counts(table)} ([each one](docs/claims.md))."


def write(page: Path, tables: dict[str, str], begin: str = TABLE, end: str = END_OF_TABLE) -> None:
    """Write tables, by name, between their markers in a page."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = between(text, begin.format(name), end.format(name), f"\n{table}\n")
    results.write_atomically(page, text)


def main() -> None:
    root = results.root()
    data = paper.Recorded(root)
    table = paper.table(data)
    results.write_atomically(root / "docs" / "claims.md", claims_page(table, data.subjects))
    write(root / "README.md", {"claims": summary(table)})
    for name, tables in pages.tables(root).items():
        write(root / "docs" / name, tables)


if __name__ == "__main__":
    main()
