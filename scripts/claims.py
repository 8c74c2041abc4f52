"""Write the numbers of `study.paper` into docs and README: python scripts/claims.py"""

import textwrap

import pandas as pd

from study import analysis, paper
from twell import results, tables

BEGIN, END = "<!-- claims: python scripts/claims.py -->\n", "<!-- end of claims -->\n"

BY_ALGORITHM = (
    "Speed over dense `torch.compile` in bf16 (H200, 131,072 tokens). *Even*: all neurons equally "
    "likely. *Skewed*: some likelier (flatters us: in trained models the union of a block of tokens "
    "is up to 25% larger).\n"
    "The authors' release was [measured outside this repository](data/README.md#releasecsv) on two "
    "days; the first day's value is in brackets.\n[More cases, and an H100]"
    "(docs/lessons/05_speedup.md#like-for-like-the-papers-algorithm-ours-and-the-authors-release)."
)


def counts(table: pd.DataFrame) -> str:
    """Return how many comparisons with the paper have each verdict, in words."""
    numbers = table["verdict"].value_counts()
    judged = [numbers.get(name, 0) for name in paper.JUDGED]
    words = ", ".join(map("{} {}".format, judged, paper.JUDGED[:4]))
    words += f", {sum(judged[4:])} open (one run, or small models)"
    beyond = f"{numbers['beyond the paper']} more, such as speeds, get no verdict"
    return f"Of {sum(judged)} comparisons: {words}. {beyond}: other algorithm or card"


def claims_page(table: pd.DataFrame, subjects: dict[str, dict]) -> str:
    """Return the generated part of docs/claims.md from `paper.table` and data/claims.yaml."""
    parts = [f"{counts(table)}."]
    for subject, about in subjects.items():
        rows = table[table["subject"] == subject]
        printed = rows["paper"] + ("; " + rows["source"]).where(rows["source"] != "", "")
        cells = paper.section(table.assign(paper=printed), subject).astype(str)
        shown = cells.replace(r"[\\|]", r"\\\g<0>", regex=True).itertuples(index=False)
        parts += [f"## {about['title']}", _wrap(about["conditions"])]
        left = [number for number, name in enumerate(cells) if name != "seeds"]
        parts.append(tables.markdown([tuple(cells), *shown], left=left))
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
        ours = (some["ours"] + some["beyond"] + " " + some["interval"]).str.strip()
        ours = joined.format(*ours)
        printed = "–" if (some["paper"] == "–").all() else joined.format(*some["paper"])
        rows.append((line["what"], line["conditions"].format(note), printed, ours))
    names = "", "conditions", "paper (H100)", "ours (H200)"
    shown = tables.markdown([names, *rows], left=range(4))
    return f"{shown}\n\n{counts(table)} ([all](docs/claims.md))."


def sides(bench: analysis.Bench) -> str:
    """Return README's table by algorithm, on one card."""
    table = analysis.like_for_like(bench).dropna(subset=analysis.PAPERS).reset_index()
    layer = "what == 'layer' and pattern != 'lively' and 28 < active < 30 and tokens == 131072"
    some = table.query(f"model == '2b' and what != 'model' or {layer}")
    some = some.sort_values("what", ascending=False, kind="stable")
    cells = some[analysis.SIDES].map("{:.2f}".format, na_action="ignore").fillna("–")
    release = bench.rows("release.csv", None, "provider == 'release' and what == 'layer'")
    release = release[release["active"].between(28, 30)].sort_values("date")
    for (tokens, pattern), same in release.groupby(["tokens", "pattern"])["speedup"]:
        if len(same) > 1:
            case = (some["tokens"] == tokens) & (some["pattern"] == pattern)
            cells.loc[case, analysis.RELEASE] += f" ({same.iloc[0]:.2f})"
    uses = {"model, compiled": " forward", "optimiser step": " training step, 32,768 tokens"}
    whole = some["model"].str.upper() + some["what"].map(uses)
    cells.insert(0, "case", whole.where(some["model"] != "", "one layer, " + some["pattern"]))
    cells.insert(1, "active", some["active"].map("{:.0f}".format))
    return tables.markdown([tuple(cells), *cells.itertuples(index=False)], left=[0])


def main() -> None:
    root = results.root()
    data = paper.Recorded(root)
    table = paper.table(data)
    layer = sides(analysis.Bench(data.folder / "bench", device="NVIDIA H200"))
    for page, content in (
        ("docs/claims.md", claims_page(table, data.subjects)),
        ("README.md", f"{summary(table, data.readme)}\n\n{BY_ALGORITHM}\n\n{layer}"),
        ("docs/report.md", f"{counts(table)}."),
    ):
        results.write_between(root / page, BEGIN, END, f"\n{content}\n\n")


if __name__ == "__main__":
    main()
