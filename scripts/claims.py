"""Write docs/claims.md and the table in README.md from twell/analysis/claims.yaml and data/: python
scripts/claims.py
"""

from __future__ import annotations

from twell import analysis, results

BEGIN, END = "<!-- claims: python scripts/claims.py -->", "<!-- end of claims -->"


def main() -> None:
    root = results.root()
    recorded = analysis.quantities.recorded(root)
    results.write_atomically(root / "docs" / "claims.md", analysis.claims.page(recorded))
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    table = f"\n{analysis.claims.summary(recorded)}\n"
    results.write_atomically(readme, analysis.claims.between(text, BEGIN, END, table))


if __name__ == "__main__":
    main()
