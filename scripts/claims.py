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

BEGIN, END = "<!-- {}: python scripts/claims.py -->", "<!-- end of {} -->"


def counts(table: pd.DataFrame) -> str:
    """Return how many comparisons with the paper have each verdict, in words."""
    numbers = table["verdict"].value_counts()
    judged = {name: numbers.get(name, 0) for name in paper.VERDICTS[:4]}
    words = ", ".join(f"{number} {name}" for name, number in judged.items())
    return f"Of {sum(judged.values())} comparisons with the paper: {words}"


def claims_page(table: pd.DataFrame, subjects: dict[str, dict]) -> str:
    """Return the generated part of docs/claims.md from `paper.table` and data/claims.yaml."""
    parts = [f"{counts(table)}."]
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
    return "\n\n".join(parts)


def _wrap(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    whole = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, 110, subsequent_indent=indent, **whole)


def summary(table: pd.DataFrame, lines: list[dict]) -> str:
    """Return README's table, and how many comparisons hold, from `paper.table`."""
    by_name, rows = table.set_index("name"), []
    for line in lines:
        some, joined = by_name.loc[line["claims"]], line["joined"]
        note, _, _ = some["note"].iloc[0].partition(";")
        ours = joined.format(*(some["ours"] + " " + some["interval"]).str.strip())
        printed = "–" if (some["paper"] == "–").all() else joined.format(*some["paper"])
        rows.append((line["what"], line["conditions"].format(note), printed, ours))
    shown = markdown(" | conditions | paper (H100) | ours (H200)", rows)
    return f"{shown}\n\n{counts(table)} ([each one](docs/claims.md))."


def write(page: Path, tables: dict[str, str]) -> None:
    """Write tables, by name, between their markers in a page."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = between(text, BEGIN.format(name), END.format(name), f"\n{table}\n")
    results.write_atomically(page, text)


def main() -> None:
    root = results.root()
    data = paper.Recorded(root)
    table = paper.table(data)
    write(root / "docs" / "claims.md", {"claims": claims_page(table, data.subjects)})
    write(root / "README.md", {"claims": summary(table, data.readme)})
    for name, tables in pages.tables(root).items():
        write(root / "docs" / name, tables)


if __name__ == "__main__":
    main()
