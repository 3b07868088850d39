"""Reading the text of a compiled program (HLO): instructions, how often each runs, and the matmul work in it.

What always holds: every instruction of the text is read, from any backend, and each counts as often as the program runs
it: the product of the trip counts of the loops around it. A trip count is the one that XLA states or, where it states
none (TPU), the one found by running the loop's integers here. A loop whose end depends on data is *dynamic*: it counts
as one trip. A form of the text that is not known here would show as a missing instruction, never as a guess.
"""

import dataclasses
import functools
import math
import operator
import re
from typing import NamedTuple

import numpy as np

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) ?(?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_CALLS = re.compile(r"(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_CALL_LISTS = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Kernels that XLA cannot look into, by the names under which cuDNN, Triton, Mosaic and their like are called.
_KERNEL = re.compile(r"cudnn|triton|mosaic|tpu_custom_call|cutlass|fmha|flash", re.I)
_MAX_TRIPS = 100_000  # what is simulated of a loop without a stated count

type Value = int | tuple | None  # a scalar, a tuple of values, or not known


class Shape(NamedTuple):
    """One array: its HLO type name and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        width = 8 if self.dtype == "pred" else int(bits[0]) if bits else 0  # a token has no bytes
        return -(-math.prod(self.dims) * width // 8)


class Instruction(NamedTuple):
    """One line of a computation; ``literal`` is the text between its parentheses, ``attributes`` that behind them."""

    name: str
    shapes: tuple[Shape, ...]
    is_tuple: bool
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def element(self) -> int:
        """Which element a get-tuple-element takes."""
        found = re.search(r"\bindex=(\d+)", self.attributes)
        assert found, self.name
        return int(found[1])

    @property
    def target(self) -> str:
        """The name of a custom call, else empty."""
        found = _TARGET.search(self.attributes) if self.opcode.startswith("custom-call") else None
        return found[1] if found else ""


class Computation(dict[str, Instruction]):
    """Instructions by name, in the order of the text; ``root`` is the name of the result."""

    root: str


class Work(NamedTuple):
    """Matmul FLOPs, and kernels that XLA cannot look into."""

    flops: int = 0
    kernels: int = 0

    def plus(self, other: "Work", times: int = 1) -> "Work":
        return Work(self.flops + times * other.flops, self.kernels + times * other.kernels)


@dataclasses.dataclass
class Program:
    """A parsed program; `runs`, `conditional` and `trips` hold what `count` found, for each computation reached."""

    computations: dict[str, Computation]
    entry: str
    num_devices: int | None
    scheduled: bool
    runs: dict[str, int] = dataclasses.field(default_factory=dict)
    conditional: dict[str, bool] = dataclasses.field(default_factory=dict)
    trips: dict[tuple[str, str], int | None] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def _works(self) -> dict[str, Work]:
        return {}

    def callees(self, instruction: Instruction) -> list[str]:
        """The computations that an instruction runs, a loop's body and condition excepted."""
        if instruction.opcode.endswith(("-done", "-update")):  # they repeat the name that their start runs
            return []
        names = _CALLS.findall(instruction.attributes)
        for group in _CALL_LISTS.findall(instruction.attributes):
            names += [name.strip().lstrip("%") for name in group.split(",")]
        return [name for name in names if name in self.computations]

    def loop(self, instruction: Instruction) -> tuple[str, str]:
        """The body and the condition of a ``while``."""
        body, condition = (re.search(rf"\b{x}=%?([\w.\-]+)", instruction.attributes) for x in ("body", "condition"))
        if not (body and condition and {body[1], condition[1]} <= set(self.computations)):
            raise ValueError(
                f"{instruction.name} has no body or condition in the text; pass the text of a whole program"
            )
        return body[1], condition[1]

    def shapes(self, computation: str, instruction: Instruction) -> list[Shape]:
        """The arrays that an instruction reads."""
        found = self.computations[computation]
        missing = [x for x in instruction.operands if x not in found]
        if missing:
            raise ValueError(f"{instruction.name} reads {missing[0]}, which the text does not define; pass all of it")
        return [shape for x in instruction.operands for shape in found[x].shapes]

    def work(self, name: str) -> Work:
        """The work of one run of a computation; a dynamic loop counts once, a conditional as its costliest branch."""
        if name not in self._works:
            total = Work()
            for instruction in self.computations[name].values():
                total = total.plus(self.work_of(name, instruction))
            self._works[name] = total
        return self._works[name]

    def work_of(self, computation: str, instruction: Instruction) -> Work:
        """The work of one run of an instruction, with that of the computations it runs."""
        if instruction.opcode == "while":
            trips = self.trips.get((computation, instruction.name))
            body, condition = self.loop(instruction)
            trips = 1 if trips is None else trips
            return Work().plus(self.work(body), trips).plus(self.work(condition), trips + 1)
        inner = [self.work(callee) for callee in self.callees(instruction)]
        if instruction.opcode == "conditional":
            return Work(*(max(each) for each in zip(*inner, strict=True))) if inner else Work()
        total = Work(_flops(self, computation, instruction), bool(_KERNEL.search(instruction.target)))
        return functools.reduce(Work.plus, inner, total)


def parse(text: str) -> Program:
    """The program of an HLO text, counted."""
    if not re.search(r"^ENTRY .*\{$", text, re.M):
        raise ValueError(
            f"the text begins with {text[:40]!r} and has no ENTRY computation, so it is no compiled HLO; "
            "pass jax.jit(f).lower(...).compile() or its as_text()"
        )
    computations: dict[str, Computation] = {}
    current, entry = Computation(), ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = Computation()
            entry = header[2] if header[1] else entry
        elif found := _INSTRUCTION.match(line):
            current[found[2]] = _instruction(found[2], found[3])
            if found[1] or not hasattr(current, "root"):
                current.root = found[2]
    head = text[: text.find("\n")]
    sizes = [re.search(rf"{x}=(\d+)", head) for x in ("num_partitions", "replica_count")]
    num_devices = math.prod(int(x[1]) for x in sizes if x) if any(sizes) else None
    program = Program(computations, entry, num_devices, "is_scheduled=true" in head)
    _count(program, entry, 1, False, ())
    return program


def _instruction(name: str, text: str) -> Instruction:
    """``SHAPE OPCODE(OPERANDS), ATTRIBUTES``: an operand may carry its shape, a tuple's has comments."""
    end = _closing(text, 0) if text.startswith("(") else text.find(" ")
    start = text.find("(", end + 1)
    if start < 0:
        raise ValueError(f"{name} = {text[:80]} is no HLO instruction; pass the text that compiled.as_text() gives")
    stop = _closing(text, start)
    shape, literal = text[:end], text[start + 1 : stop - 1]
    shapes = tuple(
        Shape(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(shape)
    )
    opcode = text[end:start].strip()
    operands = () if opcode in ("constant", "parameter") else tuple(_operands(literal))
    return Instruction(name, shapes, text.startswith("("), opcode, operands, literal, text[stop:])


def _closing(text: str, start: int) -> int:
    """One past the parenthesis that closes the one at ``start``."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.end()
    return len(text)


def _operands(text: str) -> list[str]:
    parts, depth, last = [], 0, 0
    text = re.sub(r"/\*.*?\*/", "", text)
    for match in re.finditer(r"[()\[\]{},]", text):
        if match[0] == "," and not depth:
            parts.append(text[last : match.start()])
            last = match.end()
        depth += (match[0] in "([{") - (match[0] in ")]}")
    return [part.split()[-1].lstrip("%") for part in [*parts, text[last:]] if part.strip()]


def _count(program: Program, name: str, times: int, conditional: bool, arguments: tuple[Value, ...]) -> None:
    """Adds ``times`` runs to a computation and what it runs; ``arguments`` are the integers known of its parameters."""
    program.runs[name] = program.runs.get(name, 0) + times
    program.conditional[name] = program.conditional.get(name, False) or conditional
    scope = _Scope(program, name, arguments)
    for instruction in program.computations[name].values():
        if instruction.opcode != "while":
            given = tuple(scope.value(x) for x in instruction.operands) if program.callees(instruction) else ()
            branch = conditional or instruction.opcode == "conditional"
            for callee in program.callees(instruction):
                _count(program, callee, times, branch, () if instruction.opcode == "conditional" else given)
            continue
        body, condition = program.loop(instruction)
        state = scope.value(instruction.operands[0])
        stated = _TRIPS.search(instruction.attributes)
        trips = int(stated[1]) if stated else _simulate(program, body, condition, state)
        key = name, instruction.name
        trips = program.trips[key] = trips if program.trips.get(key, trips) == trips else None
        dynamic, trips = trips is None, 1 if trips is None else trips
        kept = (_invariant(program, body, state),)
        _count(program, body, times * trips, conditional or dynamic, kept)
        _count(program, condition, times * (trips + (not dynamic)), conditional or dynamic, kept)


def _invariant(program: Program, body: str, state: Value) -> Value:
    """The entries of a loop's state that its body hands on as they are."""
    computation = program.computations[body]
    root = computation[computation.root]
    if not isinstance(state, tuple) or root.opcode != "tuple" or len(root.operands) != len(state):
        return None

    def kept(place: int, name: str) -> bool:
        entry = computation.get(name)
        return (
            entry is not None
            and entry.opcode == "get-tuple-element"
            and computation[entry.operands[0]].opcode == "parameter"
            and entry.element == place
        )

    return tuple(x if kept(i, root.operands[i]) else None for i, x in enumerate(state))


def _simulate(program: Program, body: str, condition: str, state: Value) -> int | None:
    """Trips of a loop whose condition needs known integers only, else None."""
    for trips in range(_MAX_TRIPS):
        go_on = _Scope(program, condition, (state,)).value(program.computations[condition].root)
        if not isinstance(go_on, int):
            return None
        if not go_on:
            return trips
        state = _Scope(program, body, (state,)).value(program.computations[body].root)
    return None


_ARITHMETIC = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "maximum": max, "minimum": min}
_COMPARE = {x.upper(): getattr(operator, x) for x in ("eq", "ne", "lt", "le", "gt", "ge")}


class _Scope:
    """Integer scalars of one run of a computation, as far as the text tells them; None where it does not."""

    def __init__(self, program: Program, name: str, arguments: tuple[Value, ...]):
        self.program, self.arguments = program, arguments
        self.computation = program.computations[name]
        self.known: dict[str, Value] = {}

    def value(self, name: str) -> Value:
        if name not in self.known:
            self.known[name] = None
            instruction = self.computation.get(name)
            if instruction and (instruction.is_tuple or _is_integer(instruction.shapes)):
                self.known[name] = self._evaluate(instruction)
        return self.known[name]

    def _evaluate(self, instruction: Instruction) -> Value:
        if instruction.opcode == "constant":
            text = {"true": "1", "false": "0"}.get(instruction.literal, instruction.literal)
            return int(text) if re.fullmatch(r"-?\d+", text) else None
        if instruction.opcode == "parameter":
            number = int(instruction.literal)
            return self.arguments[number] if number < len(self.arguments) else None
        values = tuple(self.value(x) for x in instruction.operands)
        match instruction.opcode:
            case "tuple":
                return values
            case "copy" | "bitcast" | "convert" | "reshape":
                return values[0]
            case "get-tuple-element":
                return values[0][instruction.element] if isinstance(values[0], tuple) else None
            case "fusion" | "call":
                callee = self.program.callees(instruction)[0]
                return _Scope(self.program, callee, values).value(self.program.computations[callee].root)
        numbers = [x for x in values if isinstance(x, int)]
        if len(numbers) < len(values):
            return None
        if instruction.opcode == "compare":
            direction = re.search(r"direction=(\w+)", instruction.attributes)
            return int(_COMPARE[direction[1]](*numbers)) if direction else None
        return _ARITHMETIC[instruction.opcode](*numbers) if instruction.opcode in _ARITHMETIC else None


def _is_integer(shapes: tuple[Shape, ...]) -> bool:
    return len(shapes) == 1 and math.prod(shapes[0].dims) == 1 and shapes[0].dtype[0] in "sup"


def _flops(program: Program, computation: str, instruction: Instruction) -> int:
    """FLOPs of a dot, a convolution or a cuBLAS call; 0 for all else."""
    cublas = instruction.target.startswith("__cublas$")
    if instruction.opcode not in ("dot", "convolution") and not cublas:
        return 0
    left, right = program.shapes(computation, instruction)[:2]
    if instruction.opcode == "convolution":
        return _convolution(left.dims, right.dims, instruction)
    names = (
        ("lhs_contracting_dimensions", "lhs_batch_dimensions") if cublas else ("lhs_contracting_dims", "lhs_batch_dims")
    )
    found = [re.search(rf'{x}\\?"?[=:][{{\[]([^}}\]]*)', instruction.attributes) for x in names]
    shared = [int(n) for x in found if x for n in re.findall(r"\d+", x[1])]
    # Batch and contracted dimensions are in both operands: 2 B M N K = 2 (B M K) (B N K) / (B K).
    return 2 * math.prod(left.dims) * math.prod(right.dims) // max(math.prod(left.dims[i] for i in shared), 1)


def _convolution(left: tuple[int, ...], right: tuple[int, ...], instruction: Instruction) -> int:
    """FLOPs of a convolution without those on padding and holes: a TPU writes a batched dot as a dilated one."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    if not labels:
        raise ValueError(f"{instruction.name} is a convolution without dim_labels; pass the text of as_text()")
    sizes = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
    output = instruction.shapes[0].dims
    total = 2 * output[labels[3].index("b")] * output[labels[3].index("f")] * right[labels[2].index("i")]

    def entry(name: str, axis: int, default: str) -> str:
        return sizes[name].split("x")[axis] if name in sizes else default

    for axis in range(len(left) - 2):
        here, kernel, result = (
            left[labels[1].index(str(axis))],
            int(entry("size", axis, "1")),
            labels[3].index(str(axis)),
        )
        low = int(entry("pad", axis, "0_0").split("_")[0])
        stride, hole, spread = (int(entry(x, axis, "1")) for x in ("stride", "lhs_dilate", "rhs_dilate"))
        place = np.arange(output[result])[:, None] * stride + np.arange(kernel) * spread - low
        total *= int(((place >= 0) & (place <= (here - 1) * hole) & (place % hole == 0)).sum())
    return total
