"""Checks and times prototypes of the gate in Gluon against twell.kernels.gate; run from the root.

    PYTHONPATH=. python3 .scratch/gluon/bench.py [--only TEXT] [--rounds N]

Every variant is compiled and checked in a process of its own, several at once, with a time limit.
Those that pass are timed in turns by one more process. Results go to $OUT/gluon.json.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = Path(os.environ.get("OUT", HERE / "out"))
K, N = 2048, 5632
START = time.time()
SIZES = {"bf16": (131_072, 16_384), "fp8": (65_536, 16_384), "tokens": (131_072, 16_384), "tokens8": (65_536, 16_384)}
# tokens, neurons, K: edges of tiles, one step, fewer steps than stages, many.
ODD = [(1, 300, 48), (100, 2817, 2048), (257, 5632, 2048), (5000, 300, 4096), (300, 2817, 192), (257, 256, 320)]
FULL = {"coop_s4", "skew2_s4", "ping_64x256", "plain_s4"}


def table() -> dict[str, dict]:
    """Options by kind of operand and name."""
    skew = dict(kind="skewed", R=64, C=256, BK=64, STAGES=4, CHUNK=64, BUFFERS=2, SKEW=2)
    coop = dict(kind="coop", R=128, C=256, BK=64, STAGES=4, CHUNK=128, BUFFERS=1)
    plain = dict(kind="plain", R=128, C=256, BK=64, STAGES=4, CHUNK=128, BUFFERS=1)
    ping = dict(kind="pingpong", R=128, C=128, BK=64, STAGES=6, CHUNK=64, BUFFERS=1)
    base = {
        "sums": dict(kind="triton"),
        "plain_s3": plain | dict(STAGES=3, CHUNK=256),
        "plain_s4": plain,
        "coop_s3": coop | dict(STAGES=3, CHUNK=256),
        "coop_s4": coop,
        "coop_s4b2": coop | dict(CHUNK=64, BUFFERS=2),
        "coop_k32s8": coop | dict(BK=32, STAGES=8),
        "skew0_s4": skew | dict(SKEW=0),
        "skew1_s4": skew | dict(SKEW=1),
        "skew2_s4": skew,
        "skew3_s4": skew | dict(SKEW=3),
        "skew1_s3": skew | dict(SKEW=1, STAGES=3, CHUNK=256, BUFFERS=1),
        "skew4_k32s8": skew | dict(BK=32, STAGES=8, SKEW=4),
        "skew2_256x128": skew | dict(R=128, C=128, BUFFERS=1),
        "skew2_group4": skew | dict(GROUP=4),
        "skew2_group16": skew | dict(GROUP=16),
        "ping_128x128": ping,
        "ping_64x256": ping | dict(R=64, C=256, STAGES=4, BUFFERS=2),
        "ping_64x256k32": ping | dict(R=64, C=256, BK=32, STAGES=9, BUFFERS=2),
        "skew2:none": skew | dict(PARTS=4),
        "skew2:store": skew | dict(PARTS=5),
        "skew2:bits": skew | dict(PARTS=6),
        "skew2:noasm": skew | dict(PARTS=3),
        "coop:none": coop | dict(PARTS=4),
        "coop:store": coop | dict(PARTS=5),
    }
    names = {f"bf16/{name}": o for name, o in base.items()}
    names |= {f"fp8/{n}": o | dict(BK=2 * o["BK"]) if "BK" in o else o for n, o in base.items()}
    few = ("sums", "plain_s4", "coop_s4", "skew0_s4", "skew2_s4")
    names |= {f"tokens/{n}": names[f"bf16/{n}"] for n in few}
    names |= {f"tokens8/{n}": names[f"fp8/{n}"] for n in few}
    return names


TABLE = table()


def run_variant(name, x, w, b, scales, threshold=0.0, zero=None):
    import gluon_gate
    import triton_gate

    options = TABLE[name]
    module = triton_gate if options["kind"] == "triton" else gluon_gate
    g, bits, _ = module.launch(
        x, w, b, by_neuron=not name.startswith("tokens"), options=options, scales=scales,
        threshold=threshold, zero=zero,
    )
    return g, bits


def today(name, x, w, b, scales, threshold=0.0, zero=None):
    from twell.kernels.gate import gate_bits

    return gate_bits(
        x, w, b, by_neuron=not name.startswith("tokens"), scales=scales, threshold=threshold,
        zero=zero,
    )


def inputs(name, m, n, k, dtype=None, nan=False):
    import torch

    torch.manual_seed(m + n + k)
    fp8 = name.split("/")[0] in ("fp8", "tokens8")
    dtype = torch.float8_e4m3fn if fp8 else dtype or torch.bfloat16
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    if nan:
        x[m // 2, k // 3] = float("nan")
    w = (torch.randn(n, k, device="cuda") * (1 if fp8 else k**-0.5)).to(dtype)
    scales = (None, None)
    if fp8:
        scales = (torch.rand(m, device="cuda") + 0.5, (torch.rand(n, device="cuda") + 0.5) / k)
    return x.to(dtype), w, scales


def compare(name, m, n, k, *, bias=False, threshold=0.0, nan=False, dtype=None):
    """A message if g or bits differ from today's; None if they are the same."""
    import torch

    x, w, scales = inputs(name, m, n, k, dtype, nan)
    b = None
    if bias:
        b = torch.randn(n, device="cuda").to(torch.bfloat16 if x.itemsize == 1 else x.dtype) * 0.3
    zero, zero2 = (torch.full((2,), 7, device="cuda", dtype=torch.int32) for _ in range(2))
    torch.use_deterministic_algorithms(True)  # fills empty tensors, so that gaps are seen
    g1, bits1 = today(name, x, w, b, scales, threshold, zero)
    g2, bits2 = run_variant(name, x, w, b, scales, threshold, zero2)
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    case = f"M {m} N {n} K {k} bias {bias} threshold {threshold} nan {nan} {x.dtype}"
    if name.startswith("tokens"):
        g1, g2 = g1[:m, :n], g2[:m, :n]
        bits1, bits2 = bits1[:m], bits2[:m]
    else:
        g1, g2 = g1[:n, :m], g2[:n, :m]
        bits1, bits2 = bits1[: -(-m // 32), :n], bits2[:, :n]
        if (bits2[-(-m // 32) :] != 0).any():
            return f"{case}: bits of tokens beyond M"
        bits2 = bits2[: -(-m // 32)]
    if not torch.equal(zero, zero2):
        return f"{case}: zero is {zero2.tolist()}, expected {zero.tolist()}"
    if (bits1 != bits2).any():
        return f"{case}: {int((bits1 != bits2).sum())} of {bits1.numel()} words differ"
    different = g1.contiguous().view(torch.int16) != g2.contiguous().view(torch.int16)
    if different.any():
        a, c = g1[different].float(), g2[different].float()
        gap = (a - c).abs().max().item()
        return f"{case}: {int(different.sum())} of {g1.numel()} of g differ, by up to {gap:.3g}"
    return None


def check(name: str) -> None:
    """Prints a JSON object: what differs, and seconds."""
    import torch

    whole = TABLE[name].get("PARTS", 7) & 3 == 3
    kind, short = name.split("/")
    started = time.time()
    problems, done = [], 0
    cases = [dict(m=m, n=n, k=k, nan=m == 257) for m, n, k in ODD]
    cases.append(dict(m=SIZES[kind][1], n=N, k=K))
    cases.append(dict(m=SIZES[kind][0], n=N, k=K))
    if short in FULL or short == "sums":
        for m, n, k in ((257, 2817, 2048), (100, 300, 48)):
            cases.append(dict(m=m, n=n, k=k, bias=True, nan=True))
            cases.append(dict(m=m, n=n, k=k, threshold=0.25))
            cases.append(dict(m=m, n=n, k=k, bias=True, threshold=0.25, nan=True))
            if kind in ("bf16", "tokens"):
                cases.append(dict(m=m, n=n, k=k, bias=True, dtype=torch.float16))
    if not whole:
        x, w, scales = inputs(name, *(SIZES[kind][1], N, K))
        run_variant(name, x, w, None, scales)
        torch.cuda.synchronize()
        cases = []
    for case in cases:
        print("case", case, file=sys.stderr, flush=True)
        problem = compare(name, case.pop("m"), case.pop("n"), case.pop("k"), **case)
        done += 1
        if problem:
            problems.append(problem)
    print(json.dumps({"problems": problems, "cases": done, "seconds": time.time() - started}))


def check_in_process(name: str) -> dict:
    limit = 60 if name.split("/")[1] in FULL | {"sums"} else 30
    if time.time() - START > 110:
        return {"error": "no time left"}
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--check", name], capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired as error:
        last = (error.stderr or b"").decode().strip().splitlines()[-1:]
        return {"error": f"over {limit} s at {last}"}
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return {"error": " | ".join(lines[-3:])[-400:]}
    return json.loads(done.stdout.splitlines()[-1])


def providers(kind: str, names: list[str], m: int):
    import torch

    x, w, scales = inputs(f"{kind}/", m, N, K)
    out = {"today": lambda: today(kind, x, w, None, scales)}
    if scales[0] is None:
        y = torch.empty(m, N, dtype=torch.bfloat16, device="cuda")
        out["cublas"] = lambda: torch.mm(x, w.T, out=y)
        if kind == "bf16":
            z = torch.empty(N, m, dtype=torch.bfloat16, device="cuda")
            out["cublas w x^T"] = lambda: torch.mm(w, x.T, out=z)
    else:
        a, c = scales[0][:, None], scales[1][None, :]
        out["scaled_mm"] = lambda: torch._scaled_mm(
            x, w.T, scale_a=a, scale_b=c, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    for name in names:
        out[name.split("/")[1]] = lambda name=name: run_variant(name, x, w, None, scales)
    return out


def measure(names: list[str], rounds: int, path: Path) -> None:
    """Medians in ms of every provider, in shuffled turns; writes after each size."""
    import torch

    random.seed(0)
    rows = []
    for kind in SIZES:
        chosen = [name for name in names if name.startswith(f"{kind}/")]
        for m in SIZES[kind]:
            if not chosen:
                continue
            calls = providers(kind, chosen, m)
            times = {name: [] for name in calls}
            repeat = 1 if m > 20_000 else 4
            for call in calls.values():
                call()
            torch.cuda.synchronize()
            for _ in range(rounds):
                order = list(calls)
                random.shuffle(order)
                events = []
                for name in order:
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    for _ in range(repeat):
                        calls[name]()
                    end.record()
                    events.append((name, begin, end))
                torch.cuda.synchronize()
                for name, begin, end in events:
                    times[name].append(begin.elapsed_time(end) / repeat)
            for name, values in times.items():
                quarter = statistics.quantiles(values, n=4)
                rows.append(
                    dict(kind=kind, m=m, name=name, ms=statistics.median(values), low=quarter[0], high=quarter[2])
                )
            del calls
            torch.cuda.empty_cache()
            path.write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check")
    parser.add_argument("--time")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--workers", type=int, default=11)
    given = parser.parse_args()
    sys.path.insert(0, str(HERE))
    if given.check:
        return check(given.check)
    OUT.mkdir(parents=True, exist_ok=True)
    if given.time:
        return measure(json.loads(given.time), given.rounds, OUT / "times.json")
    names = [name for name in TABLE if given.only in name]
    with ThreadPoolExecutor(given.workers) as pool:
        # The slow checks first, so that they do not come last.
        order = sorted(names, key=lambda name: name.split("/")[1] not in FULL | {"sums"})
        checks = dict(zip(order, pool.map(check_in_process, order), strict=True))
    print(f"checks took {time.time() - START:.0f} s")
    for name, result in checks.items():
        text = result.get("error") or "; ".join(result["problems"][:3])
        if text:
            print(f"  {name}: {text}")
    good = [name for name in names if "error" not in checks[name]]
    command = [sys.executable, __file__, "--time", json.dumps(good), "--rounds", str(given.rounds)]
    try:
        done = subprocess.run(command, timeout=110, capture_output=True, text=True)
        if done.returncode:
            print("timing failed:", done.stderr.strip().splitlines()[-3:])
    except subprocess.TimeoutExpired:
        print("timing: over the limit")
    path = OUT / "times.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    (OUT / "gluon.json").write_text(json.dumps({"checks": checks, "times": rows}, indent=1))
    report(rows, checks)
    print(f"{time.time() - START:.0f} s")


def report(rows: list[dict], checks: dict) -> None:
    """One table: ms by kind and size, and the ratio to today's."""
    columns = sorted({(row["kind"], row["m"]) for row in rows}, key=lambda c: (c[0], -c[1]))
    cells = {(row["name"], row["kind"], row["m"]): row["ms"] for row in rows}
    print("ms (today / it);  ! differs from today's")
    print(f"{'':18s}" + "".join(f"{kind + ' ' + str(m):>20s}" for kind, m in columns))
    for name in dict.fromkeys(row["name"] for row in rows):
        line = f"{name:18s}"
        for kind, m in columns:
            if (name, kind, m) not in cells:
                line += f"{'':20s}"
                continue
            ms = cells[name, kind, m]
            mark = "!" if checks.get(f"{kind}/{name}", {}).get("problems") else " "
            line += f"{ms:12.4f} {cells['today', kind, m] / ms:6.3f}{mark}"
        print(line)


if __name__ == "__main__":
    main()
