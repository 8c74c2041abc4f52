"""Checks of compiled kernels, on the text of the compiler's intermediate representation (IR).

    parse       the operations of a kernel, with every name resolved in its scope
    races       shared memory that a copy overwrites while an asynchronous product may read it
    read_back   memory of the device that a kernel stores to and loads from again without a barrier

`races` reads TTGIR (how a GPU runs the kernel), `read_back` TTIR (what the kernel computes).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

NAME = r"%[\w.$-]+(?:#\d+)?"
ROLES = "ttg.warp_specialize"  # its operands are the arguments of each partition that follows


@dataclass
class Operation:
    """One operation. `arguments` has a list for each region; a loop's begins with its variable."""

    name: str
    results: list[str]
    operands: list[str]
    text: str
    regions: list[list[Operation]] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)


class _Scopes:
    """Unique names for values: the compiler uses the same name again in sibling regions."""

    def __init__(self) -> None:
        self.names: list[dict[str, str]] = [{}]
        self.number = 0

    def define(self, name: str) -> str:
        self.number += 1
        self.names[-1][name] = f"{name}@{self.number}"
        return self.names[-1][name]

    def resolve(self, name: str) -> str:
        return next((names[name] for names in reversed(self.names) if name in names), name)


def parse(ir: str) -> Operation:
    """A module, whose one region holds the kernel's function."""
    module = Operation("module", [], [], "", [[]], [[]])
    scopes = _Scopes()
    body = [module.regions[0]]
    unfinished: list[tuple[Operation, list[str]]] = []

    def open_region(operation: Operation, arguments: list[str]) -> None:
        scopes.names.append({})
        operation.regions.append([])
        operation.arguments.append([scopes.define(name) for name in arguments])
        body.append(operation.regions[-1])

    for line in ir.splitlines():
        text = line.strip().partition(" loc(#")[0]
        if not text or text.startswith(("#", "//", "{-#", "module")):
            continue
        if text.startswith("^"):
            names = re.findall(rf"({NAME}): ", line)
            unfinished[-1][0].arguments[-1] += [scopes.define(name) for name in names]
        elif text.startswith("}") and unfinished:
            scopes.names.pop()
            body.pop()
            operation, results = unfinished[-1]
            if text.endswith("{"):
                open_region(operation, [])
                continue
            unfinished.pop()
            operation.results = [scopes.define(name) for name in results]
        elif not text.startswith("}"):
            left, _, right = text.partition(" = ") if text.startswith("%") else ("", "", text)
            results = []
            for name, count in re.findall(rf"({NAME})(?::(\d+))?", left):
                results += [f"{name}#{i}" for i in range(int(count))] if count else [name]
            kind = re.match(r'"?([\w.]+)', right)[1]
            names, arguments = re.findall(NAME, right), []
            if kind == "scf.for":
                carried = re.search(r"iter_args\((.*?)\) ->", right)
                pairs = re.findall(rf"({NAME}) = ({NAME})", carried[1]) if carried else []
                arguments = [names[0]] + [name for name, _ in pairs]
                names = names[1:4] + [value for _, value in pairs]
            elif kind == "tt.func":
                names, arguments, text = [], re.findall(rf"({NAME}): ", line), line
            elif kind.startswith("partition"):
                arguments = re.findall(rf"({NAME}): ", line)
                names = next(o for o in reversed(body[-1]) if o.name == ROLES).operands
            names = [scopes.resolve(name) for name in names]
            operation = Operation(kind, [], names, text)
            body[-1].append(operation)
            if text.endswith("{"):
                unfinished.append((operation, results))
                open_region(operation, arguments)
            else:
                operation.results = [scopes.define(name) for name in results]
    return module


def walk(operation: Operation) -> Iterator[Operation]:
    """The operation and all inside it, in the order of the text."""
    yield operation
    for region in operation.regions:
        for inner in region:
            yield from walk(inner)


# Shared memory


class _Buffers:
    """Which values are views of the same allocation."""

    def __init__(self, operations: list[Operation]) -> None:
        self.parents: dict[str, str] = {}
        for operation in operations:
            results, operands = operation.results, operation.operands
            if operation.name.startswith("ttg.memdesc_"):
                self._join(results, operands[:1])
            elif operation.name == "arith.select":
                self._join(results, operands[1:2])
                self._join(results, operands[2:3])
            elif operation.name == "ttng.warp_group_dot_wait":
                self._join(results, operands)
            elif operation.name in ("scf.for", "scf.if"):
                for region, arguments in zip(operation.regions, operation.arguments, strict=True):
                    carried = arguments[1:]
                    last = region[-1:]
                    yields = last[0].operands if last and last[0].name == "scf.yield" else []
                    self._join(results, yields)
                    self._join(carried, yields)
                    self._join(carried, operands[3:])

    def _join(self, names: list[str], others: list[str]) -> None:
        for name, other in zip(names, others, strict=False):
            if self.root(name) != self.root(other):
                self.parents[self.root(name)] = self.root(other)

    def root(self, name: str) -> str:
        while name in self.parents:
            name = self.parents[name]
        return name


def races(ttgir: str) -> list[str]:
    """Buffers that a copy overwrites while an asynchronous product of Hopper may read them.

    The product of one step still runs when the next copy starts. A pipeline therefore needs one
    buffer more than it has copies ahead. Triton 3.6 and 3.7 leave that buffer out where the same
    load also goes to registers: results are wrong now and then. All indices of an allocation count
    as one buffer, since its buffers take turns, and so do all views of it. A kernel in Gluon guards
    its buffers by barriers of its own, which test_gate_hopper.py simulates.
    """
    operations = list(walk(parse(ttgir)))
    buffers = _Buffers(operations)
    loops = [list(walk(operation)) for operation in operations if operation.name == "scf.for"]
    innermost = [loop for loop in loops if all(inner.name != "scf.for" for inner in loop[1:])]
    in_steps = {id(operation) for loop in innermost for operation in loop}
    products = [o for o in operations if o.name == "ttng.warp_group_dot"]
    products = [o for o in products if "isAsync = true" in o.text]
    operands = {buffers.root(name) for product in products for name in product.operands[:2]}
    to_registers = {buffers.root(o.operands[0]) for o in operations if o.name == "ttg.local_load"}
    problems = []
    for allocation in (o for o in operations if o.name == "ttg.local_alloc"):
        buffer = buffers.root(allocation.results[0])
        if buffer not in operands:
            continue
        if buffer in to_registers:
            problems.append(f"read by a product and into registers: {allocation.text}")
        copies = [o for o in operations if "copy_global_to_local" in o.name]
        copies = [o for o in copies if buffer in (buffers.root(name) for name in o.operands)]
        ahead = sum(id(o) not in in_steps for o in copies)
        if ahead < len(copies):
            size = int(re.search(r"memdesc<(\d+)x", allocation.text)[1])
            if size <= ahead:
                problems.append(f"{ahead} copies ahead in {size} buffers: {allocation.text}")
    return problems


def read_back(ttir: str) -> list[str]:
    """Stores of a kernel that it loads from again further down, with no barrier between.

    Another thread may load the place, and then too early.
    """
    function = next(operation for operation in walk(parse(ttir)) if operation.name == "tt.func")
    roots = {name: name for name in function.arguments[0]}
    stored: dict[str, str] = {}
    problems = []
    for operation in walk(function):
        if operation.name in ("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims"):
            roots |= {result: roots.get(operation.operands[0]) for result in operation.results}
        elif operation.name.endswith("barrier"):
            stored.clear()
        elif operation.name == "tt.store" and roots.get(operation.operands[0]):
            stored[roots[operation.operands[0]]] = operation.text
        elif operation.name == "tt.load" and roots.get(operation.operands[0]) in stored:
            problems.append(f"stored and loaded again: {stored[roots[operation.operands[0]]]}")
    return problems
