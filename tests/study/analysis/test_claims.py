"""The page of claims and README's summary are current; claims are judged by their rules."""

import re
import shlex

import numpy as np
import pandas as pd
import pytest

from scripts.claims import BEGIN, END, with_tables
from study import analysis
from study.analysis import claims, quantities
from twell import cli, results

ROOT = results.root()
BENCH = ROOT / "data" / "bench"


@pytest.fixture(scope="module")
def recorded():
    return quantities.recorded(ROOT)


@pytest.fixture
def written(monkeypatch):
    """A function that puts made-up claims of one subject in place of the file's."""

    def write(*entries):
        defaults = {"subject": "made", "evidence": ["x"], "command": "y", "claim": "A is more"}
        made = [defaults | {"name": f"made {n}"} | entry for n, entry in enumerate(entries)]
        content = {"subjects": {"made": {"title": "Made", "conditions": "None.", "claims": made}}}
        monkeypatch.setattr(claims, "load", lambda: content)
        monkeypatch.setattr(claims, "paper_numbers", lambda: {"paper_a": 3.0})

    return write


# --- what is recorded -----------------------------------------------------------------------------


def test_the_page_and_the_summary_are_current(recorded):
    again = "run `python scripts/claims.py`"
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    assert page == claims.page(recorded), again
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    current = claims.between(readme, BEGIN, END, f"\n{claims.summary(recorded)}\n")
    assert readme == current, again
    for name, tables in analysis.pages.tables(ROOT).items():
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert text == with_tables(text, tables), again


def test_every_claim_names_quantities_that_are_recorded(recorded):
    """`extra` claims of the notebook alone aside, every template and rule can be computed."""
    notebook_alone = {"specific_neuron", "silent_neuron"}
    if not (ROOT / "data" / "bench" / "trained" / "train_step.csv").is_file():
        notebook_alone |= {"flagship_step_beside_imposed"}
    for claim in claims.claims():
        names = set(claims.paper_numbers()) | set(recorded[claim["subject"]])
        templates = [claim.get(key, "") for key in ("paper", "ours", "caveat")]
        expressions = [text for one in templates for text, _ in claims.fields(one)]
        expressions += [str(claim[rule]) for rule in claims.RULES if rule in claim]
        needed = set().union(*map(claims.names_of, expressions))
        assert claim["name"] in notebook_alone or needed <= names, (claim["name"], needed - names)
    verdicts = [row["verdict"] for name, of in recorded.items() for row in claims.rows(name, of)]
    # Of FP8 the cases that have rows; these have.
    in_fp8 = {row["name"] for row in claims.rows("fp8", recorded["fp8"])}
    later = {claim["name"] for claim in claims.claims("fp8")} - in_fp8
    assert in_fp8 >= {
        "fp8_large",
        "fp8_small",
        "fp8_hundred",
        "fp8_ffn",
        "fp8_all",
        "fp8_cost_shipped",
    }
    assert len(verdicts) == len(claims.claims()) - len(notebook_alone | later)
    assert claims.NOT_MEASURED not in verdicts and set(verdicts) - {""} <= set(claims.VERDICTS)
    for subject in recorded:
        table = claims.table(subject, recorded[subject])
        assert not table.isna().any(axis=None)
        assert not table.map(lambda cell: bool(re.search(r"\bnan\b|None", cell))).any(axis=None)


def test_claims_are_whole_and_their_evidence_is_there():
    known = {"name", "subject", "claim", "paper", "source", "ours", "caveat", "evidence", "command"}
    known |= {"extra", *claims.RULES}
    for claim in claims.claims():
        assert set(claim) <= known, claim["name"]
        assert len(claim["claim"].split()) <= 9, claim["claim"]
        assert ("paper" in claim) == ("source" in claim), claim["name"]
        for pattern in claim["evidence"]:
            assert list(ROOT.glob(pattern)), (claim["name"], pattern)
        for rule in claims.RULES:
            assert rule not in claim or "paper" in claim, claim["name"]


def test_claims_about_trainings_say_of_how_many(recorded):
    """Under "ours", or in the note."""
    counted = re.compile(r"\b\d+ (seed|model|run|pair|task)|\bone (seed|run|pair)\b|\bseeds a ")
    for subject in ("sweep", "choices", "sizes", "layers", "training"):
        for row in claims.rows(subject, recorded[subject]):
            told = counted.search(row["ours"]) or counted.search(row["note"])
            assert told or "training_dips" in row["name"], row["name"]


def test_commands_exist():
    for command in {claim["command"] for claim in claims.claims()}:
        words = shlex.split(command)
        if "twell" not in words:  # python -m tests.fuzz, python -m pytest FILE
            module = words[2].replace(".", "/")
            assert module == "pytest" or (ROOT / f"{module}.py").is_file(), command
            continue
        words = words[words.index("twell") + 1 :]
        assert cli.parse(words)[0] == words[: 2 if words[0] == "measure" else 1], command


def test_some_quantities_computed_otherwise(recorded):
    """From the files, without the tables of study.analysis."""
    losses, active = {0: [], 6e-4: []}, []
    for level, of in losses.items():
        for seed in range(3):
            name = f"85m-50m-l1-{'0' if level == 0 else '6e-4'}-seed-{seed}"
            log = pd.read_csv(ROOT / "data" / "runs" / name / "log.csv.xz")
            last = log[(log["split"] == "valid") & (log["step"] == log["step"].max())]
            of.append(last.loc[last["metric"] == "cross_entropy", "value"].item())
            if level:
                active.append(last.loc[last["metric"] == "active_mean", "value"].mean())
    sweep = recorded["sweep"]
    price = 100 * (np.mean(losses[6e-4]) / np.mean(losses[0]) - 1)
    assert sweep["best_price"] == pytest.approx(price)
    assert sweep["best_active"] == pytest.approx(np.mean(active))
    assert sweep["best_inactive"] == pytest.approx(100 - 100 * np.mean(active) / 2112)

    rows = pd.read_csv(BENCH / "ffn.csv").query("tokens == 131072 and pattern == 'skewed'")
    rows = rows.query("gated and hidden_size == 2048 and 29 < active < 30")
    newest = rows[rows["date"] == rows["date"].max()].set_index("provider")["p50"]
    layer = recorded["layer_speed"]
    assert layer["large_times"] == newest["dense torch.compile"] / newest["triton union"]
    rows = pd.read_csv(BENCH / "training.csv").query("tokens == 16384 and active == 197.4")
    rows = rows[rows["mode"] == "stream"].set_index("provider")
    kept = rows["held"]["triton union"] / rows["held"]["dense torch.compile"]
    assert recorded["layer_training"]["many_union_kept"] == pytest.approx(kept)
    fuzz = pd.read_csv(BENCH / "fuzz.csv")
    newest = fuzz[fuzz["commit"].str.startswith("b40f27c") & (fuzz["dtype"] == "bfloat16")]
    worst = newest.loc[~newest["path"].str.contains("training"), "worst_relative_rms"].max()
    numbers = recorded["formats"]
    assert numbers["forward_error"] == worst
    assert (numbers["forward_failed"], numbers["forward_cases"]) == (0, 10_000)
    assert (numbers["backward_failed"], numbers["backward_cases"]) == (1, 3000)


def test_numbers_of_the_paper(monkeypatch):
    numbers = claims.paper_numbers()
    assert numbers["paper_active_dense"] == 911 and numbers["paper_speed_0_5b"] == 17.0
    assert numbers["paper_price"] == pytest.approx(100 * (2.297 / 2.255 - 1))
    assert (numbers["paper_lettered_least"], numbers["paper_lettered_most"]) == (18.6, 22.3)
    assert numbers["paper_memory_2b"] == 22.3 and numbers["paper_dead"] == ">30"
    monkeypatch.setattr(claims, "load", lambda: {"paper": {"a": {"source": "Table 1"}}})
    with pytest.raises(ValueError, match="a selects .* numbers, expected one"):
        claims.paper_numbers.__wrapped__()


# --- how a claim is read --------------------------------------------------------------------------


def test_each_verdict(written):
    rules = {"reproduced": "a > paper_a", "in_part": "a > 0", "not_testable": "a_limit > 10"}
    full = {"ours": "{a:.1f}{a_limit:±.1f}", "paper": "{paper_a:.0f}", "source": "Table 1"} | rules
    written(full)

    def verdict(**names):
        return claims.table("made", names)["verdict"].item()

    assert verdict(a=4.0, a_limit=1.0) == "reproduced"
    assert verdict(a=4.0, a_limit=20.0) == "reproduced"  # a difference that exceeds counts first
    assert verdict(a=2.0, a_limit=20.0) == "not testable"
    assert verdict(a=2.0, a_limit=1.0) == "in part"
    assert verdict(a=-1.0, a_limit=1.0) == "contradicted"
    for missing in (np.nan, None, np.float32("nan")):
        assert verdict(a=missing, a_limit=1.0) == "not measured"
        assert verdict(a=2.0, a_limit=missing) == "not testable"  # a rule that cannot be computed
    assert verdict() == "not measured"
    alone = {"ours": "{a}"}
    written(alone, alone | {"paper": "yes", "source": "Table 1"}, alone | {"extra": True})
    assert claims.table("made", {"a": 1})["verdict"].tolist() == ["ours", "", "ours"]
    assert claims.table("made", {})["verdict"].tolist() == ["not measured"] * 2  # no extra one


def test_templates_are_filled(written):
    written({"ours": "{100 * a:+.1f}{limit:±.1f}%{runs:seeds}", "caveat": "at L1 = {level}"})

    def cells(**names):
        return claims.table("made", names)[["paper", "ours", "note"]].iloc[0].tolist()

    assert cells(a=-0.01, limit=0.7, runs=3) == ["–", "−1.0 ± 0.7% (3 seeds)", ""]
    alone = cells(a=0.5, limit=np.nan, runs=1, level="6e-4")
    assert alone == ["–", "+50.0% (1 seed)", "at L1 = 6e-4"]
    assert claims.show(4e-3, ".1e") == "4.0e-3" and claims.show(np.bool(True), "") == "yes"
    assert claims.show(">30", "") == ">30" and claims.show(-2, "d") == "−2"
    assert claims.names_of("max(abs(a), log(b)) > 0") == {"a", "b"}
    with pytest.raises(KeyError):
        claims.table("no such subject", {})


def test_a_page_of_made_up_claims(written):
    several = {"ours": "{a:.1f}", "paper": "{paper_a:.0f}", "source": "Table 1"}
    several |= {"reproduced": "a > 2", "caveat": "a | b"}
    written(several, {"ours": "{b}", "evidence": ["p", "q"]})
    page = claims.page({"made": {"a": 2.5}})
    assert "| A is more | 3; Table 1 | 2.5 | reproduced | `x` |" in page
    assert "| A is more | – | not measured | not measured | `p`, `q` |" in page
    assert "Of 2 verdicts: 1 reproduced, 1 not measured." in page
    assert "- *A is more*: a | b." in page
    assert page.endswith("Commands:\n\n- `y`\n") and "| Made |" not in page
    assert claims._cell("a|b\nc") == "a\\|b c"


def test_a_table_is_put_between_its_markers():
    text = "a\n<b>\nold\n<e>\nz\n"
    assert claims.between(text, "<b>", "<e>", "new\nrows") == "a\n<b>\nnew\nrows\n<e>\nz\n"
    for marker in ("<b>", "<e>"):
        with pytest.raises(ValueError, match=f"no line '{marker}' in the text"):
            claims.between(text.replace(marker, "x"), "<b>", "<e>", "new")


def test_a_file_with_two_claims_of_one_name_is_refused(monkeypatch, tmp_path):
    claim = "{name: a, claim: b, ours: c}"
    text = f"subjects: {{s: {{evidence: x, command: y, claims: [{claim}, {claim}]}}}}\n"
    (tmp_path / "claims.yaml").write_text(text)
    monkeypatch.setattr(claims, "FILE", tmp_path / "claims.yaml")
    with pytest.raises(ValueError, match="several claims have one name: a"):
        claims.load.__wrapped__()
    assert analysis.claims is claims
