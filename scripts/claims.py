"""Write what is computed from data/ into the documents: python scripts/claims.py

docs/claims.md and the table in README.md come from study/analysis/claims.yaml, the tables between
markers in docs/benchmarks.md and docs/models.md from study/analysis/pages.py.
"""

from __future__ import annotations

from study import analysis
from twell import results

BEGIN, END = "<!-- claims: python scripts/claims.py -->", "<!-- end of claims -->"
TABLE, END_OF_TABLE = "<!-- {}: python scripts/claims.py -->", "<!-- end of {} -->"


def with_tables(text: str, tables: dict[str, str]) -> str:
    """Return a page with its tables, by name, between their markers."""
    for name, table in tables.items():
        begin, end = TABLE.format(name), END_OF_TABLE.format(name)
        text = analysis.claims.between(text, begin, end, f"\n{table}\n")
    return text


def main() -> None:
    root = results.root()
    recorded = analysis.quantities.recorded(root)
    results.write_atomically(root / "docs" / "claims.md", analysis.claims.page(recorded))
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    table = f"\n{analysis.claims.summary(recorded)}\n"
    results.write_atomically(readme, analysis.claims.between(text, BEGIN, END, table))
    for name, tables in analysis.pages.tables(root).items():
        page = root / "docs" / name
        results.write_atomically(page, with_tables(page.read_text(encoding="utf-8"), tables))


if __name__ == "__main__":
    main()
