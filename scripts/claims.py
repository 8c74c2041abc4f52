"""Write the numbers of `study.paper` into docs and README: python scripts/claims.py"""

import textwrap

import pandas as pd

from study import analysis, paper
from twell import results, tables

BEGIN, END = "<!-- claims: python scripts/claims.py -->\n", "<!-- end of claims -->\n"

CONDITIONS = """\
Rows 1 to 5, ours: our fastest kernels against dense `torch.compile`, in models with random weights.
Rows 1 to 4 have [as many active neurons](docs/glossary.md#imposed-activity) as in the paper, row 5 fewer. \
Row 5: in a CUDA graph, both sides autotuned; single calls gained 16 to 38%.
Rows 6 and 7 are of trained models: the paper's has 1.5 B parameters, ours 99 M (221 M tokens, L1 coefficient 6e-4). [±](docs/glossary.md#seed-interval-) is the 95% interval of three seeds.
"""
BY_ALGORITHM = """\
Next table ([more](docs/gallery.md#like-for-like)): speed over dense bf16 on an H200, 131,072 tokens (training 32,768), \
{:.0f} (2B) or {:.0f} active. FP8 without attention ([with it](docs/benchmarks.md#fp8)).
In an *even* layer all neurons fire equally often, in a *skewed* one some fire often. Its [unions](docs/glossary.md#union) are up to 20% smaller than in trained models, which favours our union path.
Layers: medians of three processes. The release ([measured elsewhere](data/README.md#releasecsv)) varied by 7 to 14% between two days; we show the better. On an H100 it ties with ours in whole models.
"""


def counts(table: pd.DataFrame) -> str:
    """Return how many comparisons with the paper have each verdict, in words."""
    numbers = table["verdict"].value_counts()
    judged = [numbers.get(name, 0) for name in paper.JUDGED]
    words = "{} are reproduced, {} in part, {} contradicted, {} not testable".format(*judged)
    left = f"{sum(judged[4:])} open (one run, or small models)"
    return f"Of {sum(judged)} comparisons with the paper, {words}, {left}"


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


def summary(table: pd.DataFrame, lines: dict[str, str]) -> str:
    """Return README's table from `paper.table`, and how many comparisons hold."""
    some = table.set_index("name").loc[list(lines)]
    ours = (some["ours"] + some["beyond"]).str.split().str[0] + " " + some["interval"]
    rows = zip(lines.values(), some["paper"].str.split().str[0], ours.str.strip(), strict=True)
    shown = tables.markdown([("", "paper (H100)", "ours (H200)"), *rows], left=[0])
    return f"{shown}\n\n{CONDITIONS}{counts(table)} ([all](docs/claims.md))."


def sides(bench: analysis.Bench) -> str:
    """Return README's text and table by algorithm, on one card."""
    table = analysis.like_for_like(bench).dropna(subset=analysis.PAPERS).reset_index()
    layer = "what == 'layer' and pattern != 'lively' and 28 < active < 30 and tokens == 131072"
    some = table.query(f"model == '2b' and what != 'model' or {layer}")
    some = some.sort_values("what", ascending=False, kind="stable")
    cells = some[analysis.SIDES].map("{:.2f}".format, na_action="ignore").fillna("–")
    uses = {"model, compiled": " forward", "optimiser step": " training step"}
    whole = some["model"].str.upper() + some["what"].map(uses)
    cells.insert(0, "case", whole.where(some["model"] != "", "one layer, " + some["pattern"]))
    active = some.groupby(some["model"] == "")["active"].median()
    text = BY_ALGORITHM.format(active[False], active[True])
    return f"{text}\n{tables.markdown([tuple(cells), *cells.itertuples(index=False)], left=[0])}"


def main() -> None:
    root = results.root()
    data = paper.Recorded(root)
    table = paper.table(data)
    layer = sides(analysis.Bench(data.folder / "bench", device="NVIDIA H200"))
    for page, content in (
        ("docs/claims.md", claims_page(table, data.subjects)),
        ("README.md", f"{summary(table, data.readme)}\n\n{layer}"),
        ("docs/report.md", f"{counts(table)}."),
    ):
        results.write_between(root / page, BEGIN, END, f"\n{content}\n\n")


if __name__ == "__main__":
    main()
