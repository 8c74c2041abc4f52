"""Checks of compiled kernels, on the text of the compiler's intermediate representation (IR).

    parse       the operations of a kernel, with every name resolved in its scope
    races       shared memory that a copy overwrites while an asynchronous product may read it
    read_back   memory of the device that a kernel stores to and loads from again without a barrier
    overflows   32-bit integers that leave their range at the sizes of a launch

`races` reads TTGIR (how a GPU runs the kernel), `overflows` TTIR (what the kernel computes).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path

NAME = r"%[\w.$-]+(?:#\d+)?"
ROLES = "ttg.warp_specialize"  # its operands are the arguments of each partition that follows
Problem = tuple[str, int, str, str]  # file, line, expression, and the number that it reaches


@dataclass
class Operation:
    """One operation. `arguments` has a list for each region; a loop's begins with its variable."""

    name: str
    results: list[str]
    operands: list[str]
    text: str
    location: str = ""
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
    module = Operation("module", [], [], "", regions=[[]], arguments=[[]])
    scopes = _Scopes()
    body = [module.regions[0]]
    unfinished: list[tuple[Operation, list[str]]] = []

    def open_region(operation: Operation, arguments: list[str]) -> None:
        scopes.names.append({})
        operation.regions.append([])
        operation.arguments.append([scopes.define(name) for name in arguments])
        body.append(operation.regions[-1])

    def finish(operation: Operation, results: list[str], location: str) -> None:
        operation.location = "#" + location.rstrip(")")
        operation.results = [scopes.define(name) for name in results]

    for line in ir.splitlines():
        text, _, location = line.strip().partition(" loc(#")
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
            operation.text += " " + text
            finish(operation, results, location)
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
                finish(operation, results, location)
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


# Ranges of integers

Range = tuple[float, float]
ANY: Range = (-inf, inf)


def _limits(bits: int) -> tuple[int, int]:
    return (0, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _hull(numbers) -> Range:
    numbers = list(numbers)
    return min(numbers), max(numbers)


def _times(a: float, b: float) -> float:
    return 0 if 0 in (a, b) else a * b


def _product(a: Range, b: Range) -> Range:
    return _hull(_times(x, y) for x in a for y in b)


def _growth(before: Range, after: Range) -> Range:
    return min(0, after[0] - before[0]), max(0, after[1] - before[1])


class _Ranges:
    """Bounds for all integers of a kernel in one launch, from its arguments and its grid.

    A number from memory has no bounds until it is divided, shifted or masked. It may be added: its
    owner keeps such sums in range. It may not be multiplied: that is how an index leaves its type.
    """

    def __init__(self, grid: tuple[int, ...]) -> None:
        self.grid = (*grid, 1, 1)[:3]
        self.values: dict[str, Range] = {}
        self.overflows: dict[str, Range] = {}
        self.silent = False

    def run(self, operations: list[Operation]) -> list[Range]:
        """Evaluates a region; returns what it yields."""
        for operation in operations:
            if operation.name == "scf.yield":
                return [self._get(name) for name in operation.operands]
            self.values |= zip(operation.results, self._evaluate(operation), strict=True)
        return []

    def _get(self, name: str) -> Range:
        return self.values.get(name, ANY)

    def _evaluate(self, operation: Operation) -> list[Range]:
        if operation.name == "scf.for":
            return self._loop(operation)
        if operation.name in ("tt.reduce", "tt.scan"):
            return self._reduce(operation)
        if operation.name.startswith("partition"):
            captures = [self._get(name) for name in operation.operands]
            self.values |= zip(operation.arguments[0], captures, strict=True)
        yields = [self.run(region) for region in operation.regions]
        if operation.name == "scf.if" and operation.results:
            return [_hull((*a, *b)) for a, b in zip(*yields, strict=True)]
        bits = re.search(r"[\sx<(]i(\d+)>*\)*$", operation.text)
        if yields or not bits:
            return [ANY for _ in operation.results]
        return [self._simple(operation, int(bits[1])) for _ in operation.results]

    def _simple(self, operation: Operation, bits: int) -> Range:
        """An operation with one integer result of so many bits."""
        text, name = operation.text, operation.name.partition(".")[2]
        values = [self._get(operand) for operand in operation.operands]
        a, b = (values[0], values[-1]) if values else (ANY, ANY)
        match name:
            case "constant":
                number = re.search(r"constant (?:dense<)?(-?\d+)", text)
                return (int(number[1]), int(number[1])) if number else ANY
            case "get_program_id" | "get_num_programs":
                number = self.grid["xyz".index(text.partition(name)[2].split()[0])]
                return (0, number - 1) if name == "get_program_id" else (number, number)
            case "make_range":
                end = int(re.search(r"end = (-?\d+)", text)[1])
                return int(re.search(r"start = (-?\d+)", text)[1]), end - 1
            case "splat" | "unsplat" | "broadcast" | "expand_dims" | "reshape" | "trans" | "extsi":
                return a
            case "cmpi" | "cmpf":
                return 0, 1
            case "select":
                return _hull((*values[1], *values[2]))
            case "minsi" | "minui":
                return min(a[0], b[0]), min(a[1], b[1])
            case "maxsi" | "maxui":
                return max(a[0], b[0]), max(a[1], b[1])
            case "extui":
                source = int(re.search(r"i(\d+)>? to ", text)[1])
                return a if 0 <= a[0] and a[1] < inf else (0, 2**source - 1)
            case "addi":
                return self._checked(operation, (a[0] + b[0], a[1] + b[1]), bits)
            case "subi":
                return self._checked(operation, (a[0] - b[1], a[1] - b[0]), bits)
            case "muli":
                pairs = (a, b), (b, a)
                lost = any(inf in map(abs, x) and max(map(abs, y)) > 1 for x, y in pairs)
                return self._checked(operation, ANY if lost else _product(a, b), bits, lost)
            case "trunci":
                a = ANY if a == (0, 2**bits - 1) else a  # one half of a word
                return self._known(self._checked(operation, a, bits), bits)
        return ANY if operation.name.startswith("tt.") else self._bitwise(name, a, b, bits)

    def _checked(self, operation: Operation, value: Range, bits: int, unbounded=False) -> Range:
        """The value, or no bounds after an overflow, which is noted for 32 bits."""
        low, high = _limits(bits)
        inside = not -inf < value[0] < low and not high < value[1] < inf
        if self.silent or (inside and not unbounded):
            return value
        if bits == 32:
            location = operation.location
            self.overflows[location] = _hull((*value, *self.overflows.get(location, value)))
        return ANY

    def _bitwise(self, name: str, a: Range, b: Range, bits: int) -> Range:
        """Divisions, masks and shifts. A left shift makes words of bits, and is no overflow."""
        low, high = _limits(bits)
        a, b = ((max(value[0], low), min(value[1], high)) for value in (a, b))
        shift = 0 <= b[0] and b[1] < bits
        result = ANY
        match name:
            case "divsi" | "divui" if b[0] <= 0:
                result = _hull(sign * max(map(abs, a)) for sign in (-1, 1))
            case "divsi" | "divui":
                result = _hull(abs(x) // y * (1 if x >= 0 else -1) for x in a for y in b)
            case "remsi" | "remui":
                size = max(map(abs, b)) - 1
                result = (0, min(a[1], size)) if a[0] >= 0 else (-size, size)
            case "andi" if max(a[0], b[0]) >= 0:
                result = 0, min(value[1] for value in (a, b) if value[0] >= 0)
            case "shli" if shift:
                result = _product(a, (2 ** b[0], 2 ** b[1]))
                result = result if low <= result[0] and result[1] <= high else ANY
            case "shrsi" | "shrui" if shift:
                result = _hull(x >> y for x in a for y in b)
        return self._known(result, bits)

    def _known(self, value: Range, bits: int) -> Range:
        """A bound at the end of the type says nothing."""
        low, high = _limits(bits)
        return -inf if value[0] <= low < 0 else value[0], inf if value[1] >= high > 1 else value[1]

    def _reduce(self, operation: Operation) -> list[Range]:
        """Sums, minima and maxima along an axis."""
        operand = re.search(r": \(tensor<([\dx]+)xi(\d+)>\)", operation.text)
        if not operand:
            return [ANY for _ in operation.results]
        value, kind = self._get(operation.operands[0]), operation.regions[0][-2].name
        if kind == "arith.addi":
            axis = int(re.search(r"axis = (\d+)", operation.text)[1])
            size = int(operand[1].split("x")[axis])
            total = _product(value, (1 if operation.name == "tt.scan" else size, size))
            return [self._checked(operation, total, int(operand[2]))]
        return [value if re.match(r"arith\.(min|max)[su]i", kind) else ANY]

    def _loop(self, operation: Operation) -> list[Range]:
        """What a loop carries grows in each step as in its second one, or it has no bounds.

        The first step may set a number that later ones set again.
        """
        low, high, step = (self._get(name) for name in operation.operands[:3])
        number, *carried = operation.arguments[0]
        self.values[number] = low[0], high[1] - 1
        length = high[1] - low[0]
        steps = inf if length == inf else max(0, -(-length // max(step[0], 1)))
        first = [self._get(name) for name in operation.operands[3:]]

        def once(values: list[Range]) -> list[Range]:
            self.values |= zip(carried, values, strict=True)
            return self.run(operation.regions[0])

        silent, self.silent = self.silent, True
        reached = [_hull((*a, *b)) for a, b in zip(first, once(first), strict=True)]
        growth = [_growth(a, b) for a, b in zip(reached, once(reached), strict=True)]
        grown = [
            (low + _times(max(steps - 1, 0), down), high + _times(max(steps - 1, 0), up))
            for (low, high), (down, up) in zip(reached, growth, strict=True)
        ]
        again = [_growth(a, b) for a, b in zip(grown, once(grown), strict=True)]
        for i, ((down, up), (lower, higher)) in enumerate(zip(growth, again, strict=True)):
            if lower < down or higher > up:
                grown[i] = ANY
        self.silent = silent
        once(grown)
        return grown


@cache
def _tree(file: str) -> tuple[str, list[ast.AST]]:
    source = Path(file).read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(source))
    return source, [node for node in nodes if isinstance(node, ast.BinOp | ast.AugAssign)]


def _expression(file: str, line: int, column: int) -> str:
    """The operation whose right side begins there, or else the line."""
    source, nodes = _tree(file)
    for node in nodes:
        right = node.right if isinstance(node, ast.BinOp) else node.value
        if (right.lineno, right.col_offset) == (line, column):
            return ast.get_source_segment(source, node)
    return source.splitlines()[line - 1].strip()


def _places(ttir: str, location: str) -> list[tuple[str, int, int]]:
    """Files, lines and columns of a location, from the innermost call outwards."""
    text = re.search(rf"^{location} = loc\((.*)\)$", ttir, re.MULTILINE)
    place = text and re.match(r'"(.*)":(\d+):(\d+)$', text[1])
    if place:
        return [(place[1], int(place[2]), int(place[3]))]
    inner = re.findall(r"#loc\d*", text[1]) if text else []
    return [place for location in inner for place in _places(ttir, location)]


def _without_layouts(ttgir: str) -> str:
    """Types of TTGIR as in TTIR."""
    shorter = re.sub(r"#[\w.]+<\{[^{}\n]*\}>", "#layout", ttgir)
    return _without_layouts(shorter) if shorter != ttgir else re.sub(r", #\w+(?=>)", "", ttgir)


def overflows(ttir: str, arguments: dict[str, list[int]], grid: tuple[int, ...]) -> list[Problem]:
    """The i32 results that may leave their range in a launch.

    `arguments` are the integers of each parameter of the kernel, in order. Sums, differences,
    products and narrowing count, in addresses or not; left shifts do not. A kernel in Gluon has
    TTGIR alone.
    """
    ttir = _without_layouts(ttir)
    function = next(operation for operation in walk(parse(ttir)) if operation.name == "tt.func")
    parameters = re.findall(rf'{NAME}: (\S+?)[ ,)][^%]*?loc\("(\w+)"', function.text)
    identifiers: dict[str, list[str]] = {name: [] for _, name in parameters}
    for identifier, (kind, name) in zip(function.arguments[0], parameters, strict=True):
        if kind in ("i32", "i64"):
            identifiers[name].append(identifier)
    ranges = _Ranges(grid)
    for name in identifiers:
        # An argument of 1 is a constant of the compiled kernel, unless the kernel asks for none.
        numbers = arguments[name]
        if len(numbers) != len(identifiers[name]):
            numbers = [number for number in numbers if number != 1]
        bounds = [(number, number) for number in numbers]
        ranges.values |= zip(identifiers[name], bounds, strict=True)
    ranges.run(function.regions[0])

    problems = set()
    for location, (low, high) in ranges.overflows.items():
        places = _places(ttir, location)
        file, line, column = next(place for place in places if "/triton/" not in place[0])
        expression = _expression(file, line, column)
        number = "any number" if high == inf else f"{high if high > -low else low:,}"
        problems.add(("/".join(Path(file).parts[-2:]), line, expression, number))
    return sorted(problems)
