"""Times plans for 2 to 2,048 tokens against today's paths and dense torch.compile.

From the repository root, with OUT a folder for JSON:
    PYTHONPATH=. python3.12 .scratch/few/bench.py [--tokens 16,64] [--budget 190]

Phases: workers compile every variant without the GPU; then for each number of tokens the gate is
swept, then up with the best gate, then down with both; then the best plans run in turns with
today's path and dense. Each variant is checked against fp64 and for equal bits of two replays
before it is timed. All times are replays of a CUDA graph of eight calls, each with its weights.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
START = time.perf_counter()
TOKENS = (16, 128, 64, 256, 1024, 2, 512, 4, 2048, 8, 32)
SWEEP_MS, FINAL_MS, ROUNDS = 20, 40, 3
END_SECONDS = 50  # what follows the sweeps


def say(*words) -> None:
    print(f"[{time.perf_counter() - START:6.1f}]", *words, flush=True)


# --- compilation, in processes without the GPU ---------------------------------------------------


def _start_worker() -> None:
    sys.path[:0] = [str(HERE), str(HERE.parents[1])]
    import offline

    global DONE
    DONE = offline.use_fake_driver()


def _compile(m, plan, fp8=False):
    """Compiles the kernels of a plan; returns names of kernels that failed and why."""
    import few
    import offline
    import torch

    w, layer = offline.tensors(fp8)
    try:
        few.ffn(w[:m], layer, plan, torch.empty(m) if fp8 else None)
    except Exception as error:  # the launcher itself
        return [("launcher", repr(error)[-200:])]
    problems = []
    for name, given, compiled, error in DONE:
        if error:
            problems.append((name, error))
        elif compiled.metadata.shared > 232_448:
            problems.append((name, f"needs {compiled.metadata.shared} bytes of shared memory"))
    DONE.clear()
    return problems


def _compile_today(m):
    """Compiles the kernels of today's path."""
    import offline

    from twell.kernels import decode, union

    w, layer = offline.tensors()
    (decode.ffn if m <= 64 else union.ffn)(w[:m], layer)
    problems = [(name, error) for name, _, _, error in DONE if error]
    DONE.clear()
    return problems


def _compile_eight(options):
    import gate8
    import torch

    w = torch.empty(5632, 2048, dtype=torch.bfloat16)
    try:
        gate8.compile_only(w, options)
    except Exception as error:
        return [("gate8", repr(error)[-200:])]
    problems = [(name, error) for name, _, _, error in DONE if error]
    DONE.clear()
    return problems


def compile_all(pool, tasks: dict) -> set:
    """Runs the tasks (key -> (function, *arguments)); returns the keys that failed."""
    failed = set()
    futures = {pool.submit(*task): key for key, task in tasks.items()}
    for future in as_completed(futures):
        try:
            problems = future.result()
        except Exception as error:
            problems = [("worker", repr(error)[-200:])]
        if problems:
            failed.add(futures[future])
            say("does not compile:", futures[future], problems)
    return failed


# --- measuring -----------------------------------------------------------------------------------


class Bench:
    def __init__(self, m: int, gpu, active: float = 29):
        import torch

        from twell.kernels import decode, union
        from twell.kernels.common import Layer
        from twell.measure import patterns
        from twell.measure.case import Case

        self.m, self.gpu, self.torch = m, gpu, torch
        inputs = patterns.synthetic_layer(m, active=active)
        self.case = Case.of("skewed", inputs, True, 8)
        self.x = self.case.x
        self.layers = [Layer(g, u, d.t()) for g, u, d in self.case.sets]
        assert all(layer.w_down_t.is_contiguous() for layer in self.layers)
        self.now = decode.ffn if m <= 64 else union.ffn
        self.now_y = self.now(self.x, self.layers[0])
        self.results: dict[str, dict] = {}

    def calls(self, plan):
        import few

        if plan == "today":
            return [partial(self.now, self.x, layer) for layer in self.layers]
        return [partial(few.ffn, self.x, layer, plan) for layer in self.layers]

    def capture(self, calls):
        """A replay, checked; its error, and whether bits are today's."""
        replay, outputs = self.gpu.capture(calls)
        for y in outputs:
            y.fill_(float("nan"))
        replay()
        error = max(self.case.exact.check(y, "result") for y in outputs)
        before = [y.clone() for y in outputs]
        replay()
        if not all(self.torch.equal(a, b) for a, b in zip(before, outputs, strict=True)):
            raise ArithmeticError("two replays give different bits")
        return replay, error, self.torch.equal(outputs[0], self.now_y)

    def try_plan(self, name: str, calls) -> float:
        """Microseconds of a call, infinity where it fails."""
        from twell.measure import clock

        try:
            replay, error, same = self.capture(calls)
            times = clock.graph_times(self.gpu, replay, len(calls), SWEEP_MS)
            us = 1e3 * float(sorted(times)[len(times) // 2])
            self.results[name] = {"us": round(us, 2), "error": error, "same_bits": bool(same)}
            return us
        except Exception as error:
            self.results[name] = {"failed": repr(error)[-300:]}
            say(self.m, name, "failed:", repr(error)[-160:])
            if "CUDA" in repr(error) and "illegal" in repr(error):
                raise
            return float("inf")


def text(options: dict) -> str:
    short = {"num_warps": "w", "num_stages": "s", "RESIDENT": "res", "PER_SM": "per"}
    names = [n for n in options if n not in ("STEP",)]
    names.sort(key=lambda n: ("BM", "TM", "BN", "BK", "num_warps", "num_stages").index(n) if n in ("BM", "TM", "BN", "BK", "num_warps", "num_stages") else 9)
    return " ".join(f"{short.get(n, n)}{int(options[n])}" for n in names)


def sweep(bench: Bench, form: str, failed: set, end: float):
    """The best plan of a form, one kernel after the other."""
    import variants

    parts = variants.stages(bench.m, form)
    key = variants.key_of(bench.m)
    usable = {name: [o for o in options if (key, form, name, text(o)) not in failed] for name, options in parts.items()}
    if not all(usable.values()):
        return None, float("inf")
    best = {name: options[0] for name, options in usable.items()}
    best_us = bench.try_plan(f"{form} base", bench.calls(variants.plan(bench.m, form, best)))
    for name, options in usable.items():
        for one in options[1:]:
            if time.perf_counter() - START > end:
                break
            trial = best | {name: one}
            us = bench.try_plan(f"{form} {name}: {text(one)}", bench.calls(variants.plan(bench.m, form, trial)))
            if us < best_us * 0.995:
                best, best_us = trial, us
    return best, best_us


def final(bench: Bench, calls: dict):
    """Medians of turns, by name."""
    import numpy as np

    from twell.measure import clock

    replays, out = {}, {}
    for name, several in calls.items():
        try:
            if name == "dense":
                replay, outputs = bench.gpu.capture(several)
                replay()
                bench.case.exact.check(outputs[0], "dense")
                replays[name] = replay
            else:
                replays[name], error, same = bench.capture(several)
                out[name] = {"error": error, "same_bits": bool(same)}
        except Exception as error:
            say(bench.m, name, "failed:", repr(error)[-200:])
    times = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            times[name].append(clock.graph_times(bench.gpu, replay, 8, FINAL_MS))
    for name, turns in times.items():
        out.setdefault(name, {})["us"] = round(1e3 * float(np.median(np.concatenate(turns))), 2)
    return out


def kernels(bench: Bench, calls) -> dict:
    from twell.measure import clock

    try:
        return {n: round(1e3 * ms, 2) for n, (_, ms) in clock.kernel_times(bench.gpu, calls).items()}
    except Exception as error:
        say(bench.m, "no profile:", repr(error)[-120:])
        return {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--budget", type=float, default=190)
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 4))
    args = parser.parse_args()
    tokens = [int(m) for m in args.tokens.split(",")]
    out = Path(os.environ.get("OUT", HERE)) / "few.json"

    import variants

    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(args.workers, mp_context=spawn, initializer=_start_worker)
    tasks, keys = {}, {}
    for m in tokens:
        keys.setdefault((variants.key_of(m), m == 2048), m)  # 2,048 tokens: 16 blocks, a multiple of 16
    for (key, _), m in keys.items():
        for form in ("fused", "tiles") if m <= 64 else ("tiles",):
            parts = variants.stages(m, form)
            base = {name: options[0] for name, options in parts.items()}
            for name, options in parts.items():
                for one in options:
                    tasks[key, form, name, text(one), m] = (_compile, m, variants.plan(m, form, base | {name: one}))
    # The first options are in every plan: so that they are compiled once, they go first.
    eight = {}
    try:
        import gate8

        eight = {("gate8", i): (_compile_eight, o) for i, o in enumerate(gate8.OPTIONS)}
    except ImportError:
        gate8 = None
    import torch
    import torch._dynamo

    from twell.measure import clock
    from twell.sparse import reference

    first = {("today", m): (_compile_today, m) for m in {*tokens, 1}}
    for (key, _), m in keys.items():
        for form in ("fused", "tiles") if m <= 64 else ("tiles",):
            base = {n: o[0] for n, o in variants.stages(m, form).items()}
            first["base", key, form, m] = (_compile, m, variants.plan(m, form, base))
    compile_all(pool, first)
    say(len(first), "first plans compiled")
    pending = {pool.submit(*task): key for key, task in {**tasks, **eight}.items()}

    torch.set_grad_enabled(False)
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 256)
    gpu = clock.gpu()
    say(torch.cuda.get_device_name(), torch.__version__)
    benches, dense = {}, {}
    for m in tokens:  # while the workers compile
        try:
            benches[m] = Bench(m, gpu)
        except Exception:
            say(m, "no case:", traceback.format_exc()[-400:])
    for m, bench in benches.items():
        compiled = torch.compile(reference.ffn, fullgraph=True, dynamic=False)
        dense[m] = bench.case.calls(compiled, plain=True)
        try:
            dense[m][0]()
        except Exception as error:
            say(m, "dense failed:", repr(error)[-200:])
    say("dense compiled")
    failed = set()
    for future in as_completed(pending):
        problems = future.result()
        if problems:
            failed.add(pending[future][:4])
            say("does not compile:", pending[future], problems)
    say(len(tasks), "variants compiled")

    best, record = {}, {"device": torch.cuda.get_device_name(), "tokens": {}}
    for i, (m, bench) in enumerate(benches.items()):
        here = time.perf_counter() - START
        end = here + max(args.budget - END_SECONDS - here, 0) / (len(benches) - i)
        try:
            for form in ("fused", "tiles") if m <= 64 else ("tiles",):
                here = time.perf_counter() - START
                share = (end - here) / (2 if form == "fused" else 1)
                chosen, us = sweep(bench, form, failed, here + share)
                if chosen is not None and us < float("inf"):
                    best[m, form] = chosen
                    say(m, form, f"{us:.2f} us", {n: text(o) for n, o in chosen.items()})
        except Exception:
            say(m, "stopped:", traceback.format_exc()[-300:])
        record["tokens"][m] = {"sweep": bench.results}
        out.write_text(json.dumps(record, indent=1))
    with_pdl = {("pdl", m, form): (_compile, m, variants.plan(m, form, chosen, True)) for (m, form), chosen in best.items()}
    no_pdl = compile_all(pool, with_pdl)
    say("PDL compiled")
    lines = []
    for m, bench in benches.items():
        calls = {"dense": dense[m], "today": bench.calls("today")}
        for form in ("fused", "tiles"):
            if (m, form) in best:
                calls[form] = bench.calls(variants.plan(m, form, best[m, form]))
                if ("pdl", m, form) not in no_pdl:
                    calls[f"{form} pdl"] = bench.calls(variants.plan(m, form, best[m, form], True))
        try:
            times = final(bench, calls)
        except Exception:
            say(m, "stopped:", traceback.format_exc()[-300:])
            continue
        ours = {n: t["us"] for n, t in times.items() if n not in ("dense", "today") and "us" in t}
        if not ours or "dense" not in times:
            continue
        name = min(ours, key=ours.get)
        row = {"final": times, "best": name, "plans": {f: best[m, f] for f in ("fused", "tiles") if (m, f) in best}}
        plain = [f for f in ("fused", "tiles") if f in ours]
        if time.perf_counter() - START < args.budget:
            row["kernels"] = {f: kernels(bench, calls[f]) for f in ["today", *plain]}
        record["tokens"][m].update(row)
        out.write_text(json.dumps(record, indent=1))
        d = times["dense"]["us"]
        lines.append((m, d, times, name, row))
    if gate8 is not None and time.perf_counter() - START < args.budget + 10:
        try:
            record["gate8"] = gate8.measure(gpu, Bench, final, kernels, say, failed)
            out.write_text(json.dumps(record, indent=1))
        except Exception:
            say("gate8 stopped:", traceback.format_exc()[-600:])
    # Every neuron active for some token: never much slower than today.
    for m in (4, 16, 64, 256, 1024):
        if m in benches and time.perf_counter() - START < args.budget + 15:
            try:
                full = Bench(m, gpu, active=2816)
                calls = {"today": full.calls("today")}
                for form in ("fused", "tiles"):
                    if (m, form) in best:
                        calls[form] = full.calls(variants.plan(m, form, best[m, form]))
                times = final(full, calls)
                record["tokens"][m]["all active"] = times
                say(m, "half of all entries active:", {n: t.get("us") for n, t in times.items()})
                del full, calls
                torch.cuda.empty_cache()
            except Exception:
                say(m, "stopped:", traceback.format_exc()[-300:])
    out.write_text(json.dumps(record, indent=1))
    pool.shutdown(wait=False, cancel_futures=True)
    print()
    print("tokens | dense us | today us ratio | us of each form | best, ratio | plan")
    for m, d, times, name, row in sorted(lines):
        us = {n: t["us"] for n, t in times.items() if "us" in t}
        forms = " ".join(f"{n}={v:.1f}" for n, v in us.items() if n not in ("dense", "today"))
        now = us.get("today", float("nan"))
        print(f"{m:>6} | {d:6.1f} | {now:6.1f} {d / now:5.2f} | {forms} | {name} {d / us[name]:.2f} |",
              "; ".join(f"{k}: {text(o)}" for k, o in row["plans"][name.split()[0]].items()),
              f"| bits {'same' if times[name]['same_bits'] else 'differ'} rms {times[name]['error']:.4f}")
    print("kernels, us:")
    for m, _, _, name, row in sorted(lines):
        print(f"{m:>6}", json.dumps(row.get("kernels", {})))
    say("done")


if __name__ == "__main__":
    main()
