"""The paper's claims beside ours: `claims.yaml` read, judged and written as tables.

`table` is the last table of a notebook, `page` the text of docs/claims.md, `summary` README's
table. All print the numbers of `quantities`. The top of `claims.yaml` says how an entry is written.
"""

from __future__ import annotations

import ast
import collections
import functools
import math
import re
import string
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from twell import results

FILE = Path(__file__).with_name("claims.yaml")
FUNCTIONS = {"abs": abs, "float": float, "log": math.log, "max": max, "min": min}
VERDICTS = ["reproduced", "in part", "contradicted", "not testable", "not measured", "ours"]
NOT_MEASURED = "not measured"
RULES = {"reproduced": "reproduced", "not_testable": "not testable", "in_part": "in part"}
RULE = """\
**The rule.** A claim that something changes is reproduced if our change has the paper's direction \
and exceeds
our interval (±). Where the interval around our change holds both none and the paper's, the claim \
is not testable. A
claim of no change is reproduced if our change lies within the interval, a claim of no rise if \
ours is not above it. A
bound ("at most 2%") holds if our whole interval lies within it, and is not testable if only a \
part does. What holds in
more than half of several models, but not in all, is reproduced in part. A number without ± is \
compared as it is."""
HEADER = "<!-- Written by `python scripts/claims.py` from study/analysis/claims.yaml. -->"


# --- the file -------------------------------------------------------------------------------------


@functools.cache
def load() -> dict[str, Any]:
    """Return `claims.yaml`: paper, subjects and summary.

    Each claim also holds its subject, and the subject's evidence (a list) and command where it has
    none of its own. Raises ValueError for two claims of one name.
    """
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    names: collections.Counter[str] = collections.Counter()
    for subject, about in content["subjects"].items():
        inherited = {"subject": subject, "evidence": about["evidence"], "command": about["command"]}
        about["claims"] = [inherited | claim for claim in about["claims"]]
        names.update(claim["name"] for claim in about["claims"])
        for claim in about["claims"]:
            evidence = claim["evidence"]
            claim["evidence"] = [evidence] if isinstance(evidence, str) else evidence
    repeated = [name for name, number in names.items() if number > 1]
    if repeated:
        raise ValueError(f"several claims have one name: {', '.join(sorted(repeated))}")
    return content


def claims(subject: str | None = None) -> list[dict[str, Any]]:
    """Return the claims of one subject, or of all. Raises KeyError for an unknown subject."""
    subjects = load()["subjects"]
    chosen = subjects if subject is None else [subject]
    return [claim for name in chosen for claim in subjects[name]["claims"]]


@functools.cache
def paper_numbers() -> dict[str, Any]:
    """Return the section `paper` of the file as numbers and strings, from data/paper.yaml.

    Raises ValueError for a query that does not select one row, or one a model.
    """
    printed, numbers = results.paper(), {}
    for name, query in load()["paper"].items():
        if isinstance(query, str):
            numbers[name] = evaluate(query, numbers)
            continue
        selected = printed
        for column, value in query.items():
            if column not in ("by", "take"):
                selected = selected[selected[column] == value]
        if "take" in query:
            selected = selected.sort_values("value", ascending=query["take"] == "min")[:1]
        chosen = {name: selected["value"]}
        if "by" in query:
            models = selected.groupby(query["by"])["value"]
            chosen = {f"{name}_{key.lower().replace('.', '_')}": one for key, one in models}
        for key, values in chosen.items():
            if len(values) != 1:
                raise ValueError(f"{key} selects {len(values)} numbers, expected one: {query}")
            numbers[key] = values.iloc[0]
    return numbers


# --- templates and rules --------------------------------------------------------------------------


def names_of(expression: str) -> set[str]:
    """Return the quantities that an expression names."""
    nodes = ast.walk(ast.parse(expression.strip(), mode="eval"))
    return {node.id for node in nodes if isinstance(node, ast.Name)} - set(FUNCTIONS)


def fields(template: str) -> list[tuple[str, str]]:
    """Return the fields of a template, each an expression and its format."""
    parsed = string.Formatter().parse(template)
    return [(expression, spec or "") for _, expression, spec, _ in parsed if expression is not None]


def evaluate(expression: str, names: dict[str, Any]) -> Any:
    """Return the value of an expression, or None where a quantity that it names is missing."""
    needed = names_of(expression)
    if any(missing(names.get(name)) for name in needed):
        return None
    known = FUNCTIONS | {name: names[name] for name in needed}
    return eval(expression, {"__builtins__": {}}, known)


def missing(value: Any) -> bool:
    """Return whether a quantity is None or NaN."""
    return value is None or not isinstance(value, str) and value != value


def show(value: Any, spec: str) -> str:
    """Return a value in a format of Python, or of ours (see `claims.yaml`).

    With a minus sign and short exponents.
    """
    if spec.startswith("±"):
        return "" if missing(value) else f" ± {value:{spec[1:]}}"
    if spec == "seeds":
        return " (1 seed)" if value == 1 else f" ({value:.0f} seeds)"
    if type(value).__name__.startswith("bool"):
        return "yes" if value else "no"
    text = re.sub(r"e([+-])0(\d)$", r"e\1\2", format(value, spec))
    return text if isinstance(value, str) else re.sub(r"^-", "−", text)


def fill(template: str, names: dict[str, Any]) -> str | None:
    """Return a template with its fields, or None where one of them, no limit (±), is missing."""
    text = ""
    for literal, expression, spec, _ in string.Formatter().parse(template):
        text += literal
        if expression is not None:
            value = evaluate(expression, names)
            if missing(value) and not (spec or "").startswith("±"):
                return None
            text += show(value, spec or "")
    return text.replace(") (", "; ")  # "(17.9 active; 3 seeds)"


def judge(claim: dict[str, Any], names: dict[str, Any]) -> str:
    """Return the verdict on a claim: one of VERDICTS, or nothing for a claim without a rule."""
    if fill(claim["ours"], names) is None:
        return NOT_MEASURED
    rules = [rule for rule in RULES if rule in claim]
    if not rules:
        return "" if "paper" in claim else "ours"
    for rule in rules:
        holds = evaluate(str(claim[rule]), names)
        if holds is None or holds:
            return "not testable" if holds is None else RULES[rule]
    return "contradicted"


# --- tables --------------------------------------------------------------------------------------


def rows(subject: str, quantities: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the claims of a subject with paper, ours, verdict and note as text.

    Extra claims that lack a quantity are left out.
    """
    names = paper_numbers() | quantities
    printed = []
    for claim in claims(subject):
        ours = fill(claim["ours"], names)
        if ours is not None or not claim.get("extra"):
            row = {"paper": fill(claim.get("paper", "–"), names), "ours": ours or NOT_MEASURED}
            row |= {"verdict": judge(claim, names)}
            row |= {"note": fill(claim.get("caveat", ""), names) or ""}
            printed.append(claim | row)
    return printed


def table(subject: str, quantities: dict[str, Any]) -> pd.DataFrame:
    """Return the claims of a subject beside quantities: claim, paper, ours, verdict and note.

    A claim without its quantities is "not measured"; a claim about a second model (`extra`) is then
    left out. Raises KeyError for an unknown subject.
    """
    columns = ["claim", "paper", "ours", "verdict", "note"]
    return pd.DataFrame(rows(subject, quantities), columns=columns)


def page(recorded: dict[str, dict[str, Any]]) -> str:
    """Return the text of docs/claims.md; recorded: `quantities.recorded`."""
    parts = [HEADER, "# Claims", _introduction(recorded)]
    for subject, about in load()["subjects"].items():
        printed = rows(subject, recorded.get(subject, {}))
        parts += [f"## {about['title']}", _wrap(about["conditions"]), _markdown(printed)]
        notes = [_wrap(f"- *{row['claim']}*: {row['note']}.") for row in printed if row["note"]]
        commands = dict.fromkeys(row["command"] for row in printed)
        if notes:
            parts += ["Notes:", "\n".join(notes)]
        parts += ["Commands:", "\n".join(f"- `{command}`" for command in commands)]
    return "\n\n".join(parts) + "\n"


def _wrap(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    whole = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, 110, subsequent_indent=indent, **whole)


def _counts(recorded: dict[str, dict[str, Any]]) -> dict[str, int]:
    """How many claims have each verdict."""
    subjects = (rows(subject, recorded.get(subject, {})) for subject in load()["subjects"])
    verdicts = collections.Counter(row["verdict"] for printed in subjects for row in printed)
    return {verdict: verdicts[verdict] for verdict in VERDICTS}


def _introduction(recorded: dict[str, dict[str, Any]]) -> str:
    counts = _counts(recorded)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"""\
What [the paper](https://arxiv.org/abs/2603.23198) claims, and what we found.
Every number of ours is computed from `data/`, which [data/README.md](../data/README.md) describes.

| verdict | meaning |
|---|---|
| reproduced | our number supports the claim |
| in part | the direction is the paper's, the size is not, or only some runs agree |
| contradicted | our number speaks against the claim |
| not testable | our models, their conditions, or the noise between seeds cannot tell |
| not measured | we have no number |
| ours | the paper claims nothing |
| not compared | the two numbers are of different things |

{RULE}

Of {sum(counts.values())} verdicts: {verdicts}."""


def _markdown(printed: list[dict[str, Any]]) -> str:
    lines = ["| claim | paper | ours | verdict | evidence |", "|---|---|---|---|---|"]
    for row in printed:
        paper = row["paper"] + (f"; {row['source']}" if "source" in row else "")
        evidence = ", ".join(f"`{name}`" for name in row["evidence"])
        cells = row["claim"], paper, row["ours"], row["verdict"] or "not compared", evidence
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that a Markdown table can hold."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def summary(recorded: dict[str, dict[str, Any]]) -> str:
    """Return README's table of the section `summary`, and how many claims hold."""
    printed = {}
    for subject, quantities in recorded.items():
        printed |= {row["name"]: row for row in rows(subject, quantities)}
    lines = ["| | conditions | paper (H100) | ours (H200) |", "|---|---|---|---|"]
    for entry in load()["summary"]:
        of = [printed[name] for name in entry["claims"]]
        joined = entry.get("joined", ", ".join(["{}"] * len(of)))
        sides = [[row[side] for row in of] for side in ("paper", "ours")]
        cells = ("–" if set(cells) == {"–"} else joined.format(*cells) for cells in sides)
        names = paper_numbers() | recorded[of[0]["subject"]]
        row = entry["what"], fill(entry["conditions"], names) or NOT_MEASURED, *cells
        lines.append("| " + " | ".join(map(_cell, row)) + " |")
    counts = _counts(recorded)
    judged = {verdict: counts[verdict] for verdict in VERDICTS[:4]}
    compared = f"Of {sum(judged.values())} comparisons with the paper"
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in judged.items())
    lines += ["", f"{compared}: {verdicts} ([each one](docs/claims.md))."]
    return "\n".join(lines)


def between(text: str, begin: str, end: str, content: str) -> str:
    """Return a text with `content` between two marker lines.

    Raises ValueError for a text without one of them.
    """
    for marker in (begin, end):
        if marker not in text.splitlines():
            raise ValueError(f"no line {marker!r} in the text; put it where the table belongs")
    head, _, rest = text.partition(f"{begin}\n")
    _, _, tail = rest.partition(f"{end}\n")
    return f"{head}{begin}\n{content}\n{end}\n{tail}"
