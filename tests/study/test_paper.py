"""The paper number by number: every claim has a number of ours, from data, and a verdict."""

import pandas as pd
import pytest

from scripts import claims, lessons
from study import paper
from twell import results

ROOT = results.root()


@pytest.fixture(scope="module")
def lesson():
    """The cells and names of the lesson that computes the table."""
    return lessons.run(ROOT / "notebooks" / "00_paper.ipynb", {})


def test_the_documents_have_the_numbers_of_the_table(lesson):
    page = (ROOT / "docs" / "lessons" / "00_paper.md").read_text(encoding="utf-8")
    assert lessons.page("00_paper", lesson[0]) == page, "run make lessons"
    data, table = lesson[1]["data"], lesson[1]["claims"]
    assert (table["ours"] + table["beyond"] != "").all() and set(table["verdict"]) <= set(paper.VERDICTS)
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    assert claims.claims_page(table, data.subjects) in page, "run python scripts/claims.py"
    assert claims.summary(table, data.readme) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_main_number_computed_otherwise(lesson):
    """Inactive neurons at the recommended level, and the price, from the logs alone."""
    losses, data, table = {}, lesson[1]["data"], lesson[1]["claims"]
    for level in ("0", "6e-4"):
        runs, log = data.runs(f"85m-50m-l1-{level}-seed-*")
        last = log[(log["split"] == "valid") & (log["tokens"] == log["tokens"].max())]
        losses[level] = last.loc[last["metric"] == "cross_entropy", "value"]
        active = last.loc[last["metric"] == "active_mean", "value"].mean() / 2112
    ours = table.set_index("name")["ours"]
    assert ours["inactive"] == f"{100 * (1 - active):.2f}%"
    price = 100 * (losses["6e-4"].mean() / losses["0"].mean() - 1)
    assert ours["price"] == f"{price:+.1f}%".replace("-", "−")


def test_a_bound_holds_if_the_whole_interval_is_within_it():
    verdicts = [paper.at_most(2, value, 0.5) for value in (1.0, 1.9, 2.1, 3.0)]
    assert verdicts == ["reproduced", "not testable", "not testable", "contradicted"]
    opposite = [paper.more_than(2, value, 0.5) for value in (3.0, 2.1, 1.9, 1.0)]
    assert opposite == verdicts


def test_a_verdict_needs_the_size_the_margin_and_several_runs():
    sizes = [(31, 1), (28, 1), (11, 1), (1, 2), (-9, 2), (20, 25)]
    verdicts = [paper.close(value, 31, limit) for value, limit in sizes]
    assert verdicts[:3] == ["reproduced", "reproduced", "in part"]
    assert verdicts[3:] == ["contradicted", "contradicted", "not testable"]
    same = [paper.no_change(value, 0.4) for value in (0.5, -0.5, 0.8, 1.5, -1.5)]
    assert same == ["reproduced", "reproduced", "not testable", "contradicted", "contradicted"]
    assert paper.row("x", "1", "reproduced", seeds=1)["verdict"] == "one run"
    beyond = paper.row("x", "1", "beyond the paper", seeds=1)
    assert (beyond["ours"], beyond["beyond"], beyond["verdict"]) == ("", "1", "beyond the paper")


def test_a_trend_that_hangs_on_one_point_says_so():
    def rises(values):
        return "reproduced" if values.iloc[-1] > values.iloc[0] + 1 else "not testable"

    values = pd.Series([0.0, 3.0, 3.5], ["a", "b", "c"])
    assert paper.hangs(rises, values) == "it hangs on one point: without a it is not testable"
    assert paper.hangs(rises, values + [0, 0, 9]) == ""
