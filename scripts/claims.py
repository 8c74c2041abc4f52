"""Write the numbers of `study.paper` into docs/claims.md and README: python scripts/claims.py"""

import textwrap
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from study import paper
from twell import results

BEGIN, END = "<!-- claims: python scripts/claims.py -->", "<!-- end of claims -->"


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


def markdown(columns: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a table; columns: names between bars, a colon behind those of numbers."""
    names = [name.strip() for name in columns.split("|")]
    rule = "|".join("---:" if name.endswith(":") else "---" for name in names)
    lines = [" | ".join(map(str, row)) for row in ([name.rstrip(":") for name in names], *rows)]
    head, *rest = (f"| {line} |" for line in lines)
    return "\n".join([head, f"|{rule}|", *rest])


def write(page: Path, content: str) -> None:
    """Write a table between the two marker lines of a page, which it has to have."""
    text = page.read_text(encoding="utf-8")
    head, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, tail = rest.partition(f"{END}\n")
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN!r} and {END!r}; put them around the table")
    results.write_atomically(page, f"{head}{begin}\n{content}\n\n{end}{tail}")


def main() -> None:
    root = results.root()
    data = paper.Recorded(root)
    table = paper.table(data)
    write(root / "docs" / "claims.md", claims_page(table, data.subjects))
    write(root / "README.md", summary(table, data.readme))


if __name__ == "__main__":
    main()
