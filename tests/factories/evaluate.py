"""Items of the paper's tasks, as the hub has them and as local files have them."""

import json

import datasets
import torch

HARD = """a the ' " it's \\n {{x}} {% 中 é 007 3 50% A. #""".split() + ["\n", "  ", "[1, 2]"]
SEVEN = "arc_easy arc_challenge hellaswag openbookqa piqa winogrande commonsense_qa".split()
FIELDS = ("query", "choices", "gold")


def text(random, length=6):
    """A text that neither begins nor ends with a space, and is no number."""
    return f"w{' '.join(random.choice(HARD, length))}z"


def arc(random):
    choices = [text(random, 3) for _ in range(random.integers(3, 6))]
    labels = ["12345", "ABCDE"][random.integers(2)][: len(choices)]
    query, gold = text(random), int(random.integers(len(choices)))
    hub = {"choices": {"text": choices, "label": [*labels]}, "answerKey": labels[gold]}
    return hub | {"question": query}, query, choices, gold


def openbookqa(random):
    hub, query, choices, gold = arc(random)
    hub["question_stem"], hub["answerKey"] = hub.pop("question"), " " + hub["answerKey"]
    return hub, query, choices, gold


def piqa(random):
    query, choices, gold = text(random), [text(random), text(random)], int(random.integers(2))
    hub = {"goal": query, "sol1": choices[0], "sol2": choices[1], "label": gold}
    return hub, query, choices, gold


def winogrande(random):
    before, after, choices = text(random), text(random), [text(random, 1), text(random, 1)]
    query, gold = f"{before} _{['', ' '][random.integers(2)]}{after} a_b", int(random.integers(2))
    hub = {"sentence": query, "option1": choices[0], "option2": choices[1]}
    return hub | {"answer": str(gold + 1)}, query, choices, gold


def commonsense_qa(random):
    query, choices = f" {text(random)} ", [text(random, 2) for _ in range(5)]
    gold = int(random.integers(5))
    hub = {"question": query, "choices": {"text": choices, "label": [*"ABCDE"]}}
    return hub | {"answerKey": "ABCDE"[gold]}, query, choices, gold


def hellaswag(random):
    hub = {"activity_label": "Home", "ctx_b": "", "label": "3"}
    hub["ctx_a"] = "How to [substeps] do it [title] First [header] it's"
    hub["endings"] = ["a [step] b", "[c] d", ", e", "f  g"]
    return hub, "Home: How to do it. First it's", ["a b", " d", ", e", "f g"], 3


HUB = {
    ("allenai/ai2_arc", "ARC-Easy"): ("arc_easy", arc),
    ("allenai/ai2_arc", "ARC-Challenge"): ("arc_challenge", arc),
    ("allenai/openbookqa", "main"): ("openbookqa", openbookqa),
    ("baber/piqa", None): ("piqa", piqa),
    ("allenai/winogrande", "winogrande_xl"): ("winogrande", winogrande),
    ("tau/commonsense_qa", None): ("commonsense_qa", commonsense_qa),
    ("Rowan/hellaswag", None): ("hellaswag", hellaswag),
}


def write_both(random, folder):
    """Write six random items of each task to files; return `datasets.load_dataset` of the same."""
    hub = {}
    folder.mkdir()
    for place, (task, make_one) in HUB.items():
        made = [make_one(random) for _ in range(6)]
        lines = [json.dumps(dict(zip(FIELDS, item, strict=True))) for _, *item in made]
        (folder / f"{task}_test.jsonl").write_text("\n".join(lines))
        hub[place] = datasets.Dataset.from_list([doc for doc, *_ in made])

    def load_dataset(path, name=None, **_):
        splits = ("train", "validation", "test")
        return datasets.DatasetDict({split: hub[path, name] for split in splits})

    return load_dataset


@torch.no_grad()
def brute_force(model, context, continuation):
    """The definition: parts of one context, each with as much before it as fits."""
    size, total = model.config.max_position_embeddings, 0.0
    for at in range(0, len(continuation), size):
        part = continuation[at : at + size]
        window = (context + continuation[: at + len(part)])[-(size + 1) :]
        logits = model(input_ids=torch.tensor([window[:-1]])).logits[0, -len(part) :].double()
        total += float(logits.log_softmax(-1)[range(len(part)), part].sum())
    return total
