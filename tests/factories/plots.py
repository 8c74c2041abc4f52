"""Small inputs of every figure, without chance."""

import warnings

import numpy as np
import pandas as pd

from study import analysis, plots
from tests.factories import analysis as made
from twell import results

UNION, HYBRID, EAGER = "triton union", "triton hybrid", "dense eager"
IN_BF16 = [name for name in plots.PROVIDERS if "FP8" not in name]
IN_FP8 = (
    "dense FP8 torch.compile",
    "dense FP8 by tensors torch.compile",
    f"{UNION} FP8",
    "triton rowwise FP8",
)


def curves(steps=40, scale=1.0):
    """A curve of each of two levels of L1, that goes up and down."""
    rows = [(f"run-{l1:g}", l1, 10 * n + 10) for l1 in (0, 1e-3) for n in range(steps)]
    table = pd.DataFrame(rows, columns=["run", "l1_coefficient", "step"])
    values = scale * (1 + table.index.to_numpy() * 7 % 11)
    return table.assign(tokens=table["step"] * 4096, value=values)


def sweep(**columns):
    """Four levels: two alive, one that is not used, and one with a dead layer."""
    table = {"run": list("abcd"), "l1_coefficient": [0, 1e-3, 1e-2, 1e-1], "tokens": 1e6}
    table |= {"cross_entropy": [4.0, 4.04, 4.2, 4.4], "cross_entropy_change": [0, 1, 5, 10]}
    table |= {"active": [150.0, 30.0, 3.0, 0.0], "active_std": 15.0, "cross_entropy_std": 0.1}
    table |= {"runs": [3, 1, 1, 1], "status": ["alive", "alive", "unused", "dead layer"]}
    table = pd.DataFrame(table | columns)
    return table.assign(active_fraction=table["active"] / 500)


def two_runs_a_level():
    unknown = {"cross_entropy_change": np.nan, "status": "alive"}
    return sweep(l1_coefficient=[1e-3, 1e-3, 1e-2, 1e-2], **unknown)


def two_budgets():
    longer = sweep()[:2].assign(tokens=2e6, cross_entropy=[3.0, 3.04], runs=1)
    return pd.concat([sweep(), longer], ignore_index=True)


def budgets():
    """Two levels on two numbers of tokens, with seeds at the first."""
    level, tokens = [0.0, 0.0, 1e-3, 1e-3], [1e6, 2e6] * 2
    table = {"tokens": tokens, "l1_coefficient": level, "runs": [3, 1, 3, 1], "dense_runs": 3}
    for name, values in (("active", [90.0, 80, 9, 8]), ("dead", [0.0, 1, 20, 30])):
        table[name] = np.array(values)
        table |= {f"{name}_low": table[name] - 1, f"{name}_high": table[name] + 1}
    table |= {"change": [0.0, 0, -1, 1], "change_low": -1.5, "change_high": 1.5}
    table |= {"train_change": [0.0, 0, -1, 2], "train_change_low": -1.5, "train_change_high": 2.5}
    table = pd.DataFrame(table)
    ends = [name for name in table if name.endswith(("_low", "_high"))]
    table.loc[table["runs"] == 1, ends] = np.nan
    return table


def race():
    raced = pd.DataFrame({"run": list("aaabbb"), "backend": ["dense"] * 3 + ["auto"] * 3})
    raced["l1_coefficient"], raced["tokens"] = 1e-3, [0.0, 1e6, 2e6] * 2
    raced["seconds"] = [0.0, 60, 120, 0, 50, 80]
    raced["cross_entropy"] = [9.0, 4, 3, 9, 4, 2.9]
    raced["peak_memory"] = [np.nan] * 3 + [62e9] * 3
    raced["train_last"] = 2.9
    speeds = raced[["run", "tokens"]].assign(metric="tokens_per_second", step=raced["tokens"])
    speeds["value"] = [100.0, 200, 200] * 2
    memory = speeds.iloc[3:].assign(metric="peak_memory", value=[62e9, 62e9, 45e9])
    return raced, analysis.reached(raced), pd.concat([speeds, memory], ignore_index=True)


def relufied():
    """Students of four shares; the sparsest has a higher loss, one layer of it is silent."""
    shares = {0.0: (50, 40), 0.3: (35, 25), 0.1: (12, 8), 0.02: (4, 0.5)}
    return made.tables(
        *(
            made.relufied_run(f"relufied-{share}", share, active, 0.1 + 0.3 * n)
            for n, (share, active) in enumerate(shares.items())
        )
    )


def many_relufied():
    """As many students as a study may have, with long names."""
    shares, thresholds = (0.0, 0.3, 0.1, 0.02), (0.0, 0.2, 0.5)
    asked = [(share, threshold, 1) for share in shares for threshold in thresholds]
    asked += [(0.1, 0.5, times) for times in (2, 4, 8, 16)]
    return made.tables(
        *(
            made.relufied_run(
                f"run-{n}",
                share,
                (60 - 3 * n, 50 - 3 * n),
                0.1 + 0.05 * n,
                threshold=threshold,
                tokens=10_000_000 * times,
            )
            for n, (share, threshold, times) in enumerate(asked)
        )
    )


def answered():
    """Pairs, outcomes and budgets of students, two of nearly the same activity."""
    runs, log = made.tables(*made.relufied_study())
    pairs = analysis.relufied_pairs(runs, made.kept_answers())
    table = analysis.relufied_runs(runs, log)
    return pairs, table, analysis.relufied_budgets(table, pairs)


def frontier():
    pairs, table, _ = answered()
    line = analysis.relufied_frontier(table, pairs, made.kept_answers(), 0.3)
    return pairs, table, line, "A model"


def gains():
    """Two layers with a line each, and one of a single point."""
    case = [(2048, 5632, True, 65536), (2048, 8192, False, 65536), (4096, 14336, True, 1)]
    rows = [(*of, share) for of in case[:2] for share in (0.001, 0.01, 0.1)] + [(*case[2], 0.01)]
    names = ["hidden_size", "intermediate_size", "gated", "tokens", "active_fraction"]
    table = pd.DataFrame(rows, columns=names).assign(pattern="skewed", provider=UNION)
    table["device"] = np.where(table["hidden_size"] == 4096, "another GPU", "a GPU")
    table["calls"] = np.where(table["tokens"] == 1, "one token", "many tokens")
    return table.assign(speedup=2.5 - 5 * table["active_fraction"] ** 0.5)


def remedies():
    """Curves by choice, with three seeds of one; no L1 warm-up has an active neuron."""
    runs, log = made.tables(*made.family(), made.made("reinit-2", 1e-3, 1.0, 2, 6.5, reinit=0.1))
    runs, metrics = analysis.remedied(runs, 1e-3), ("active_mean", "dead_fraction")
    active, dead = (analysis.training_curves(runs, log, metric) for metric in metrics)
    active.loc[active["choice"] == "L1 warm-up", "value"] = 0.0
    return active, dead, 1000


def choices():
    """Levels of every choice; one of balanced columns is not alive."""
    unused = made.made("ours-b", 3e-3, 3.0, 1.0, 5.0, balance_every=1)
    table = analysis.levels(analysis.choices(*made.tables(*made.family(), unused)))
    balanced = table["choice"] == "balanced columns"
    table.loc[balanced & (table["l1_coefficient"] == 3e-3), "status"] = "unused"
    return table


def sizes(active_noise=0.1, loss_noise=0.2):
    """Ours and the paper's, and the noise of seeds; our middle one has no dense model."""
    of = {"width": 200}
    runs = [made.scaled("a", 1e7, 0, 0, 20), made.scaled("b", 1e7, 1e-3, 1.0, 5)]
    runs += [made.scaled("c", 9e7, 0, 0, 20, **of), made.scaled("d", 9e7, 1e-3, 3.0, 6, **of)]
    table = analysis.sizes(*made.tables(*runs, made.scaled("e", 2e7, 1e-3, 3.0, 5.5)))
    noise = {"active_fraction": active_noise, "cross_entropy_change": loss_noise}
    return table, analysis.paper_sizes(results.paper()), noise


def clusters():
    """Two providers on 8 and 64 GPUs, sharded in two ways; sending exceeds computing once."""
    columns = "provider gpus shards compute send hours hours_apart".split()
    rows = []
    for provider, ms in (("dense torch.compile", 800.0), ("triton union torch.compile", 400.0)):
        rows.append((provider, 8, "all GPUs", ms, 100.0, ms / 10, ms / 10 + 10))
        for shards, send in (("all GPUs", 75.0), ("a node", 50.0)):
            longer, both = max(ms / 8, send), ms / 8 + send
            rows.append((provider, 64, shards, ms / 8, send, longer / 10, both / 10))
    return pd.DataFrame(rows, columns=columns)


def computed(*runs):
    """One training in several ways; rows of its curves in another order."""
    runs = made.tables(*runs)
    table, rows = analysis.computed_otherwise(*runs), analysis.computed_curves(*runs)
    return table, rows.sample(frac=1, random_state=1)


def on_a_cpu(memory=()):
    sparse = made.trained("a", [8, 4], [10, 20], memory, backend="triton")
    return computed(sparse, made.trained("b", [8, 4], [30, 40]))


def layers(means):
    means = np.array(means, float)
    table = pd.DataFrame({"layer": range(len(means)), "mean": means, "p99": 4 * means})
    return table.assign(max=np.ceil(12 * means)), "L1 = 0.5"


def tokens(strings):
    number = np.arange(len(strings))
    return pd.DataFrame({"token": strings, "count": number + 16, "mean_active": number + 0.5})


# Mathematics, control characters, another script.
ANY_TEXT = ["a$_b", " the", "\n", "$", "\t", "\x00", *"skipped", "\\frac", "x" * 40, "é", "$x$"]


def positions():
    active = [5, 3, 2, 0, 50, 40, 30, 20]
    table = pd.DataFrame({"position": [0, 1, 2, 3] * 2, "l1_coefficient": [0.1] * 4 + [0] * 4})
    return table.assign(mean_active=active)


def passage():
    strings = ["$x", " word", "\n", "", *(f" longer{n}" for n in range(8))]
    active = [3.0, 1.0, 2.0, 9.0, 0.0, 30.0, 4.0, 5.0, 6.0, 7.0, 8.0, 1.0]
    return pd.DataFrame({"token": strings, "active": active})


def inspected(low, high):
    """A view of the inspector: of one token nothing is known, two tiles overflow."""
    strings = [" the", "$x_1$", "\n", "a", "\x00", "\u05e9"]
    values = np.linspace(low, high, len(strings))
    counts = np.arange(12.0).reshape(2, 6) * 8
    values[3] = counts[:, 3] = np.nan
    counts = pd.DataFrame(counts, [2, 3], range(30, 36))
    over = counts > 70
    return pd.DataFrame({"token": strings, "value": values}), counts, over, "h", (low, high)


def specific():
    table = pd.DataFrame({"neuron": range(4), "token": [" $a", "\n", "b", "c"]})
    share, coverage = [0.9, 0.8, 0.5, 0.1], [0.2, 1.0, 0.5, 0.3]
    return table.assign(layer=1, fires=[9, 8, 7, 6], share=share, coverage=coverage)


def surprise(**columns):
    bins = {"surprise": [0.5, 2.0, 7.0], "active": [10.0, 20.0, 60.0]}
    bins = pd.DataFrame(bins | {"q25": [8.0, 15, 30], "q75": [12.0, 30, 80]})
    table = pd.DataFrame({"layer": [0, 1, -1] * 2, "of": ["surprise"] * 3 + ["next_surprise"] * 3})
    middle = np.array([0.1, 0.3, 0.2, 0.5, 0.4, 0.45])
    numbers = {"low": middle - 0.05, "spearman": middle, "high": middle + 0.1} | columns
    return bins, table.assign(**numbers)


def silenced(stderr=0.5):
    change = {"loss_change": [0.001, -0.004, 0.003, 0.0, 0.002]}
    table = pd.DataFrame({"layer": 2, "neuron": range(5)} | change)
    return table.assign(stderr=stderr * table["neuron"] / 1000)


def around(low=-0.01):
    where = pd.DataFrame({"where": analysis.WHERE, "scale": [1.0, 0.1, 0.0]})
    table = pd.DataFrame({"factor": [0.0, 1.0, 2.0], "rise": [0.3, 0.0, 0.2]})
    table = table.merge(where, how="cross").assign(rise=lambda t: t["rise"] * t["scale"])
    return table.assign(low=table["rise"] + low, high=table["rise"] + 0.02)


def speeds(cases, providers=IN_BF16, **columns):
    """Speed-ups and memory held, in another order; cases: tokens, active, pattern, and the way."""
    names = ["tokens", "active", "pattern", "mode", "weight_sets"]
    table = pd.DataFrame(cases, columns=names[: len(cases[0])])
    table = table.merge(pd.DataFrame({"provider": [*providers]}), how="cross")
    layer = {"hidden_size": 2048, "intermediate_size": 5632, "gated": True, "dtype": "bfloat16"}
    number = 1 + table.index.to_numpy() * 7 % 11
    table = table.assign(speedup=number / 4, held_share=9 * number, **layer, device="a GPU")
    call = {"p50": 1 / number, "energy": np.nan, "commit": "a", "command": "b", "date": "c"}
    table = table.assign(**call)
    low, high = table["speedup"] * 0.95, table["speedup"] * 1.1
    spread = {"speedup_low": low, "speedup_high": high}
    return table.assign(**spread | columns).sample(frac=1, random_state=1)


def by_activity(*providers):
    """Two batch sizes and patterns, and where lines fall below 1; the last is not drawn."""
    cases = [(n, a, p) for n in (65536, 16384) for a in (3, 29.2, 300) for p in ("even", "skewed")]
    falls = [("skewed", 65536, UNION, 150.4), ("skewed", 16384, EAGER, 39.6)]
    falls += [("skewed", 16384, UNION, 45.0), ("even", 65536, UNION, np.nan)]
    falls += [("even", 16384, UNION, 77.0), ("even", 16384, "triton decode", 50.0)]
    columns = ["pattern", "tokens", "provider", "crossover"]
    return speeds(cases, providers, mode="stream"), pd.DataFrame(falls, columns=columns)


def batches(providers=IN_BF16):
    cases = [(1, 178.0, "graph", 8), (1, 178.0, "stream", 1), (1000, 30.0, "graph", 8)]
    cases += [(n, a, "stream", 1) for n, a in ((1024, 29.0), (131072, 23.5), (16384, 23.0))]
    cases = [(tokens, active, "skewed", *way) for tokens, active, *way in cases]
    return speeds(cases, providers)


def roofline():
    """Two providers with a kernel that computes nothing, and one of which nothing is known."""
    columns = ["kernel", "ms", "tflops", "intensity", "floor"]
    rows = [("gate", 5.0, 640.0, 1600.0, 4.0), ("lists", 0.04, 0.0, 0.0, 0.02)]
    rows += [("other", 0.1, *[np.nan] * 3), ("up", 2.0, 640.0, 1500.0, 3.0)]
    kernels = pd.DataFrame([*rows, ("down", 1.0, 4.0, 2.0, 0.5)], columns=columns)
    case = speeds([(131072, 29.4, "skewed")], [UNION, analysis.BASELINE])
    table = case.merge(kernels, how="cross").assign(peak=800.0, bandwidth=4000.0)
    return table.assign(share=table["floor"] / table["ms"])


def evaluated(*records):
    return analysis.by_level(analysis.seven_tasks(analysis.evaluations(records)))


def tasks():
    """A dense model of two sizes above chance, a sparse one at chance."""
    records = [made.evaluation("a", gain=0.1), made.evaluation("b", l1=1e-3)]
    records += [made.evaluation("c", gain=0.2, parameters=40_000_000)]
    return evaluated(*records), analysis.paper_tasks(results.paper())


def paired(seeds=2):
    """Of three tasks one is no accuracy; sparse models have one more right answer of four."""
    rows = []
    for side, right in (("dense", 2), ("sparse", 3)):
        for seed in range(seeds):
            correct = [int(item < right) for item in range(4)]
            for task in ("piqa", "last_word", "held_out_text"):
                one = {"run": f"{side} {seed}", "task": task, "correct": correct, "nats": 3.0}
                rows.append(pd.DataFrame(one))
    names = ([f"{side} {seed}" for seed in range(seeds)] for side in ("dense", "sparse"))
    return analysis.paired_runs(pd.concat(rows), *names)


def levels_of_sizes():
    gains = {0: 0.1, 1e-2: 0.08, 1e-3: 0}
    records = [made.evaluation(f"s{l1}", l1=l1, gain=gain) for l1, gain in gains.items()]
    more = {"parameters": 40_000_000, "training_tokens": None}
    records += [made.evaluation(f"l{l1}", l1=l1, **more) for l1 in (1e-3, 3e-5, 0, 1e-5)]
    return analysis.several_levels(evaluated(*records)), analysis.paper_levels(results.paper())


def models():
    rows = [made.model_rows([10.0, 8.0, 8.0], energy=[10.0, 7.0, 7.0])]
    return analysis.model_speedups(pd.concat([*rows, made.model_rows([10.0, 20.0, 10.0], 911.0)]))


def steps():
    times = {"dense torch.compile": 6.0, "triton union torch.compile": 4.0}
    return analysis.step_speedups(made.step_rows(times, peak=[100, 72]))


def contributions():
    rows = made.model_layer_rows(10.0, [9.0, 7.0, 12.0], [50.0, 10.0, 0.0], auto=[9.0, 7.0, 10.0])
    return analysis.layer_contributions(rows).sample(frac=1, random_state=1)


def parts(factor=1.0, **columns):
    dense = {"attention": 3.0, "norms, rotary, residuals": 1.0, "gate": 4.0, "up and down": 8.0}
    dense = {name: factor * ms for name, ms in dense.items()}
    return made.part_rows(dense, dense | {"up and down": 2.0 * factor}, **columns)


def decoding_parts():
    rows = [parts(0.01 * n, batch=n, tokens=n, context=512) for n in (4, 1)]
    return analysis.layer_parts(pd.concat(rows, ignore_index=True))


def decoding(tuned=False, fp8=False):
    """Of one document, which may be tuned or in FP8 too, and of 32, where auto is dense."""
    rows = [made.decode_rows([4.0, 2.0, 2.0]), made.decode_rows([8.0, 10.0, 8.0], batch=32)]
    rows[1].loc[rows[1]["provider"] == "auto torch.compile", "path"] = "dense 28"
    if tuned:
        rows.append(made.decode_rows([3.0, 2.0, 2.0]))
        rows[2]["provider"] += " tuned"
    if fp8:
        times = {"dense FP8 torch.compile": 3.5, "triton FP8 torch.compile": 1.5}
        rows += [made.decode_rows(times)]
    return analysis.decode_speedups(pd.concat(rows))


def scale():
    """Table 1 beside forward passes of 2B alone."""
    rows = analysis.model_speedups(made.model_rows([10.0, 9.0, 8.0], 24.0, model="2b"))
    return analysis.scale_table(results.paper(), rows, pd.DataFrame())


def fp8_quality(whole=True):
    """A layer and a model in bf16 and FP8; another's cross-entropy, without intervals in bf16."""
    times = {made.BASE: 8.0, UNION: 4.0, "triton rowwise": 5.0, "auto": 3.0} | dict(
        zip(IN_FP8, [5.0, 4.5, 2.0, 3.0], strict=True)
    )
    layer = analysis.speedups(made.speed_rows(4096, 29.0, times, p20=1.9, p80=8.1))
    models = [f"{kind}{' FP8' * (n > 0)}{' all' * (n > 1)} torch.compile" for n in range(3)
              for kind in ("dense", "triton")]  # fmt: skip
    times = dict(zip(models, [9.0, 7.0, 7.5, 6.0, 7.0, 5.0], strict=True))
    model = analysis.model_speedups(made.model_rows(times, model="2b"))
    quality = analysis.fp8_quality(made.quality_rows([0.0, 0.004, 0.002, 0.009, 0.007]))
    tables = (analysis.speed_and_quality(analysis.fastest(one), quality) for one in (layer, model))
    layer, model = tables
    return [layer, model if whole else model[:0], quality]


def at_a_glance(fp8=True):
    activity = pd.DataFrame({"place": [0, 0, 1], "token": [" a", " a", "b"], "neuron": [3, 7, 2]})
    rows = [("dense", "cublas matmul", 9.0), ("dense", "relu_times_kernel", 1.0)]
    rows += [(UNION, "union_gate_bits_kernel", 3.0), (UNION, "lists_kernel", 0.5)]
    rows += [(UNION, "up_kernel", 1.5), (UNION, "down_kernel", 1.0)]
    kernels = pd.DataFrame(rows, columns=["provider", "kernel", "ms"])
    case = {"hidden_size": 4, "intermediate_size": 10, "tokens": 2, "active": 1.5}
    gains = {"quantity": ["forward speed"] * 2 + ["training speed"] * 2, "model": [*"abab"]}
    gains |= {"change": [10.0, 11.0, 12.0, 13.0], "paper_change": 5.0}
    gains |= {"low": [9.0, 10.0, np.nan, np.nan], "high": [12.0, 11.5, np.nan, np.nan]}
    models = pd.DataFrame(gains).assign(device="NVIDIA B1", paper_device="H1")
    times = {"dense": 9.5, "sparse": 6.5} | ({"dense FP8": 7.0, "sparse FP8": 4.0} if fp8 else {})
    layers = pd.DataFrame({"side": list(times), "p50": list(times.values())})
    return activity, 10, kernels, layers.assign(**case, device="a GPU"), models


def cells():
    dense = np.zeros((4, 16), np.float32)
    dense[0, [1, 9]] = dense[1] = 1  # a full row overflows
    return analysis.format_cells(dense, tile_n=8, compression=2, ell_width=3)


# Case -> the function that draws it, and its arguments.
CASES = {
    "formats": ("fig01_formats", lambda: [cells(), 8]),
    "bytes": ("fig01_bytes", lambda: [analysis.format_bytes(32, 512, [2.0, 60.0])]),
    "curves": ("fig02_training_curves", lambda: [curves()]),
    "sweep": ("fig03_frontier", lambda: [sweep()]),
    "two runs a level": ("fig03_frontier", lambda: [two_runs_a_level()]),
    "two budgets": ("frontier", lambda: [two_budgets()]),
    "budgets": ("over_tokens", lambda: [budgets()]),
    "race": ("race", race),
    "over training": ("fig09_activity_over_training", lambda: [curves(), curves(steps=2), 5000]),
    "no window": ("fig09_activity_over_training", lambda: [curves(scale=0), curves()[:0], 1000]),
    "remedies": ("fig08_remedies", remedies),
    "one seed, no window": ("fig08_remedies", lambda: [remedies()[0][:3], remedies()[1][:0], 1]),
    "relufied": (
        "relufied_course",
        lambda: [analysis.relufied_course(*relufied()), analysis.relufied_runs(*relufied())],
    ),
    "price of relufying": (
        "relufied_price",
        lambda: [
            table(*relufied()) for table in (analysis.relufied_runs, analysis.relufied_layers)
        ],
    ),
    "many relufied": (
        "relufied_course",
        lambda: [f(*many_relufied()) for f in (analysis.relufied_course, analysis.relufied_runs)],
    ),
    "price of many": (
        "relufied_price",
        lambda: [f(*many_relufied()) for f in (analysis.relufied_runs, analysis.relufied_layers)],
    ),
    "tasks of relufied": ("relufied_tasks", lambda: [*answered()[:2], "A model"]),
    "tokens of relufied": ("relufied_tokens", lambda: [answered()[2], answered()[1], "A model"]),
    "frontier of relufied": ("relufied_frontier", frontier),
    "tokens without answers": (
        "relufied_tokens",
        lambda: [answered()[2].assign(difference=np.nan), answered()[1]],
    ),
    "gains": ("gains_by_share", lambda: [gains(), [0.05], "a GPU"]),
    "gains without models": ("gains_by_share", lambda: [gains()]),
    "choices": ("choices_frontier", lambda: [choices()]),
    "sizes": ("scale_activity", sizes),
    "sizes without noise": ("scale_activity", lambda: sizes(np.nan, np.nan)),
    "clusters": ("cluster_costs", lambda: [clusters(), "A training."]),
    "ways": ("computed_otherwise", lambda: computed(made.SPARSELY, made.BY_TWO, made.DENSELY)),
    "no memory": ("computed_otherwise", on_a_cpu),
    "memory of one": ("computed_otherwise", lambda: on_a_cpu([1, 2])),
    "layers": ("fig06_layers", lambda: layers([3, 20, 0])),
    "many layers": ("fig06_layers", lambda: layers(range(1, 29))),
    "tokens": ("fig07a_tokens", lambda: [tokens(ANY_TEXT)]),
    "few tokens": ("fig07a_tokens", lambda: [tokens([f"t{n}" for n in range(7)])]),
    "positions": ("fig07b_positions", lambda: [positions()]),
    "passage": ("fig_passage", lambda: [passage(), 48]),
    "passage of silence": ("fig_passage", lambda: [passage().assign(active=0.0), 48]),
    "signed": ("fig_inspector", lambda: inspected(-2.0, 2.0)),
    "linear": ("fig_inspector", lambda: inspected(0.0, 5.0)),
    "logarithmic": ("fig_inspector", lambda: inspected(1.5, 40.0)),
    "specific": ("fig_specific", lambda: [specific(), 3]),
    "surprise": ("fig_surprise", surprise),
    "surprise without intervals": ("fig_surprise", lambda: surprise(low=np.nan, high=np.nan)),
    "silenced": ("fig_silenced", lambda: [silenced(), 4]),
    "silenced without intervals": ("fig_silenced", lambda: [silenced(np.nan)]),
    "around a word": ("fig_around_word", lambda: [around(), " United"]),
    "around a word without intervals": ("fig_around_word", lambda: [around(np.nan), "$x$"]),
    "by activity": ("ffn_activity", lambda: by_activity("auto", UNION, HYBRID, EAGER)),
    "by activity, in FP8 too": ("ffn_activity", lambda: by_activity("auto", UNION, *IN_FP8)),
    "training": ("training_activity", lambda: by_activity("auto", UNION, HYBRID, EAGER)),
    "batches": ("ffn_tokens", lambda: [batches(), 29]),
    "batches in FP8": ("ffn_tokens", lambda: [batches(["auto", UNION, *IN_FP8]), 29]),
    "a batch": ("ffn_tokens", lambda: [batches().query("tokens == 1024"), 29]),
    "roofline": ("ffn_roofline", lambda: [roofline()]),
    "roofline, nothing known": ("ffn_roofline", lambda: [roofline().query("kernel == 'other'")]),
    "tasks": ("table6_tasks", tasks),
    "answers": ("paired_tasks", lambda: [paired()]),
    "answers of a seed": ("paired_tasks", lambda: [paired(1)]),
    "levels of sizes": ("fig03_accuracy", levels_of_sizes),
    "forward": ("fig04_levels", lambda: [models()]),
    "steps": ("fig05_levels", lambda: [steps()]),
    "contributions": ("fig06_contributions", lambda: [contributions()]),
    "parts": ("model_parts", lambda: [analysis.layer_parts(parts())]),
    "parts of decoding": ("model_parts", lambda: [decoding_parts()]),
    "decoding": ("model_decode", lambda: [decoding(tuned=True)]),
    "decoding, not tuned": ("model_decode", lambda: [decoding(tuned=False)]),
    "decoding in FP8": ("model_decode", lambda: [decoding(fp8=True)]),
    "FP8": ("fp8_quality", fp8_quality),
    "FP8, a layer": ("fp8_quality", lambda: fp8_quality(whole=False)),
    "table 1": ("table1_scale", lambda: [scale()]),
    "overview": ("overview", at_a_glance),
    "overview without FP8": ("overview", lambda: at_a_glance(fp8=False)),
}


def draw(case):
    """The rendered figure of a case.

    What cannot be drawn (mathematics in a token, a log axis of zeros) raises or warns, which fails.
    """
    name, arguments = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = getattr(plots, name)(*arguments())
        figure.draw_without_rendering()  # the canvas of a figure without pyplot draws nothing
    return figure
