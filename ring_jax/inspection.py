"""What a compiled program sends, copies, computes and keeps, read from the program itself.

What always holds: a collective counts once, in whatever form the backend writes it (a CPU's plain instruction, a GPU's
start and done, a TPU's chain of fusions), and its bytes are those that *one* device sends in one run. Sizes come from
the operands, never from the tuple that a start returns, which holds the result as well: that would count a hop twice.
The ring's promises (N - 1 hops, nothing gathered, hops behind matmuls) can therefore be checked on any machine that can
compile the program, without running it. Not read: send and receive pairs, ragged all-to-all.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from ring_jax import hlo, topology

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: one of `KINDS`.
      dtype: HLO name of the type moved (``f32``, ``bf16``); that of the first array where there are several.
      axes: mesh axes it runs over, ``("sequence",)``; ``("sequence[2]",)`` for groups of 2 within that axis; empty for
        groups of one device; None without a mesh, or where the groups follow no axis.
      shift: k, where a permute sends from every device to the one k further on in its group; else None. Without a mesh,
        further on in device numbers.
      participants: devices in a group.
      bytes: sent by one device in one run: a permute sends its array; with ``g`` participants an all-gather sends
        (g-1)/g of its output, a reduce-scatter or all-to-all (g-1)/g of its input, an all-reduce 2(g-1)/g of it.
      runs: how often one run of the program executes it; a loop of unknown length counts as one trip.
      conditional: within a conditional or a loop of unknown length, so that ``runs`` is not certain.
      asynchronous: other work may be done between its start and its done.
      hidden_flops: matmul FLOPs scheduled between start and done; None if not asynchronous or not scheduled.
      hidden_kernels: kernels (cuDNN, Triton, Mosaic) scheduled there.
      hidden: whether a matmul or a kernel is scheduled there.
      scope: the operation's name in JAX, ``jit(f)/.../ppermute``, with the `jax.named_scope`s around it; may be empty.
    """

    kind: str
    dtype: str
    axes: tuple[str, ...] | None
    shift: int | None
    participants: int
    bytes: int
    runs: int
    conditional: bool
    asynchronous: bool
    hidden_flops: int | None
    hidden_kernels: int
    hidden: bool
    scope: str

    def over(self, axis: str) -> bool:
        """Whether it runs over a mesh axis: "sequence" for all or part of it, "sequence[2]" for just such groups."""
        return axis in (self.axes or ()) or axis in [x.split("[")[0] for x in self.axes or ()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What one device does in one run of a compiled program; ``print(report)`` shows it as a table.

    Attributes:
      axes: of the mesh; None without one.
      collectives: every collective reached, in the order of the text.
      copies: executions of copies that read or write an array that a collective sends or returns. Copies within a
        fusion of other work are not told apart from it, and not counted.
      flops: of dots and convolutions. A conditional counts as its costliest branch.
      kernels: executions of custom kernels, whose FLOPs are not known.
      dynamic_loops: loops of unknown length: each counts as one trip, so ``flops`` and ``runs`` are lower bounds.
      temporaries, arguments, outputs: bytes on one device; None where the text alone was given.
    """

    axes: tuple[str, ...] | None
    collectives: tuple[Collective, ...]
    copies: int
    flops: int
    kernels: int
    dynamic_loops: int
    temporaries: int | None
    arguments: int | None
    outputs: int | None

    def select(self, kind: str | None = None, axis: str | None = None) -> list[Collective]:
        """The collectives of one kind, over one axis; all where None. Groups that follow no axis are over none."""
        if kind is not None and kind not in KINDS:
            raise ValueError(f"{kind=} must be one of {', '.join(KINDS)}, or None for all")
        if axis is not None and axis.split("[")[0] not in (self.axes or ()):
            names = "not known without a mesh: give one to inspect" if self.axes is None else ", ".join(self.axes)
            raise ValueError(f"{axis=} must be an axis of the mesh ({names}), or a part of one as in 'sequence[2]'")
        return [x for x in self.collectives if kind in (None, x.kind) and (axis is None or x.over(axis))]

    def sent_bytes(self, kind: str | None = None, axis: str | None = None) -> int:
        """Bytes that one device sends in one run of the program."""
        return sum(x.runs * x.bytes for x in self.select(kind, axis))

    def count(self, kind: str | None = None, axis: str | None = None) -> int:
        """Executions of collectives in one run of the program."""
        return sum(x.runs for x in self.select(kind, axis))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as JSON has it."""
        result = dataclasses.asdict(self) | {"sent_bytes": self.sent_bytes()}
        result["axes"] = self.axes and list(self.axes)
        result["collectives"] = [x | {"axes": x["axes"] and list(x["axes"])} for x in result["collectives"]]
        return result

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("collective", "axes", "shift", "group", "type", "bytes", "runs", "sent", "hidden FLOPs", "notes")
        ]
        for x in self.collectives:
            axes = "?" if x.axes is None else ",".join(x.axes) or "-"
            shift = "-" if x.shift is None else f"+{x.shift}"
            hidden = "-" if x.hidden_flops is None else f"{x.hidden_flops:,}"
            notes = {
                "async": x.asynchronous,
                "exposed": x.asynchronous and not x.hidden,
                f"{x.hidden_kernels} kernels hide it": x.hidden_kernels,
                "conditional": x.conditional,
            }
            notes = ", ".join(note for note, holds in notes.items() if holds)
            sizes = f"{x.bytes:,}", f"{x.runs:,}", f"{x.runs * x.bytes:,}"
            rows.append((x.kind, axes, shift, str(x.participants), x.dtype, *sizes, hidden, notes))
        loops = f" (lower bound: {self.dynamic_loops} loops of unknown length count once)" if self.dynamic_loops else ""
        memory = [("temporaries", self.temporaries), ("arguments", self.arguments), ("outputs", self.outputs)]
        lines = [
            *_table(rows),
            f"sent {self.sent_bytes():,} bytes in {self.count():,} collectives; {self.copies:,} copies of moved arrays",
            f"matmul {self.flops:,} FLOPs{loops}; {self.kernels:,} kernels",
            "bytes: " + ", ".join(f"{name} {'?' if size is None else f'{size:,}'}" for name, size in memory),
        ]
        return "\n".join(lines)


def inspect(compiled: Any, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None) -> Report:
    """Report what a compiled program sends, copies, computes and keeps on one device.

        sent_bytes = sum over collectives of runs x bytes

    Args:
      compiled: what ``jax.jit(f).lower(...).compile()`` returns, for CPU, GPU or TPU, or its HLO text.
      mesh: the mesh that the program was compiled for; with it, collectives are named by the axes they run over.

    Returns:
      A `Report`. Bytes, FLOPs and runs are exact but for loops whose length depends on data, which count as one trip.

    Raises:
      TypeError: ``compiled`` is neither text nor a compiled program.
      ValueError: the text is no compiled HLO, or ``mesh`` has another number of devices than the program.

    Example:
      >>> print(inspect(jax.jit(jnp.dot).lower(jnp.ones((2, 3)), jnp.ones((3, 4))).compile()).flops)
      48

    Reference:
      OpenXLA, Operation semantics, https://openxla.org/xla/operation_semantics.
    """
    text = compiled if isinstance(compiled, str) else getattr(compiled, "as_text", lambda: None)()
    if not isinstance(text, str):
        raise TypeError(
            f"compiled={compiled!r:.80} is a {type(compiled).__name__} without text; "
            "pass jax.jit(f).lower(...).compile(), or the HLO text that its as_text() gives"
        )
    program = hlo.parse(text)
    sizes = dict(mesh.shape) if mesh is not None else None
    if sizes is not None and program.num_devices not in (None, math.prod(sizes.values())):
        raise ValueError(
            f"mesh={sizes} has {math.prod(sizes.values())} devices, the program runs on {program.num_devices}; "
            "pass the mesh that it was compiled for"
        )
    reached = [name for name in program.computations if program.runs.get(name)]
    spans = {name: _Spans(program, name) for name in reached}
    inside = {callee: span for each in spans.values() for callee, span in each.wrapped.items()}
    found = [
        _collective(program, sizes, name, instruction, inside.get(name) or spans[name].span(instruction))
        for name in reached
        if not any(name in each.repeats for each in spans.values())
        for instruction in program.computations[name].values()
        if _kind(instruction)
    ]
    work = program.work(program.entry)
    memory = compiled.memory_analysis() if hasattr(compiled, "memory_analysis") else None
    return Report(
        axes=None if sizes is None else tuple(sizes),
        collectives=tuple(found),
        copies=sum(program.runs[name] * _copies(program, name, spans[name]) for name in reached),
        flops=work.flops,
        kernels=work.kernels,
        dynamic_loops=sum(trips is None for trips in program.trips.values()),
        temporaries=memory and memory.temp_size_in_bytes,
        arguments=memory and memory.argument_size_in_bytes,
        outputs=memory and memory.output_size_in_bytes,
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = (0, 1, 4, 9)
    return [
        "  ".join(
            x.ljust(w) if i in left else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _kind(instruction: hlo.Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


_CARRIES_ON = ("get-tuple-element", "tuple", "bitcast", "async-update", "call-update")


class _Span(NamedTuple):
    """Where a collective that has a start ends, and the work scheduled before that; a GPU may run one in place."""

    end: str | None
    work: hlo.Work
    asynchronous: bool


class _Spans:
    """The collectives of one computation that have a start: where each ends, what it wraps, what repeats it.

    Four forms: ``all-gather-start``; ``async-start``, whose computation holds the collective; a TPU's fusion with
    AsyncCollectiveStart in it, after which matmul fusions, which repeat the collective, carry it on to the fusion with
    AsyncCollectiveDone; and ``call-start`` of a computation for a TPU's SparseCore, which only makes it ready: the
    collective begins at the ``call-update`` that hands it its operands.
    """

    def __init__(self, program: hlo.Program, name: str):
        self.program, self.name = program, name
        self.computation = program.computations[name]
        self.of: dict[str, _Span] = {}
        self.wrapped: dict[str, _Span] = {}
        self.repeats: set[str] = set()
        for instruction in self.computation.values():
            callees = program.callees(instruction)
            wraps = instruction.opcode in ("async-start", "call-start") and any(self._holds(x, None) for x in callees)
            wraps = wraps or any(self._holds(x, "AsyncCollectiveStart") for x in callees)
            if wraps or (_kind(instruction) and instruction.opcode.endswith("-start")):
                self.of[instruction.name] = self._follow(instruction)
            if wraps:
                self.wrapped |= dict.fromkeys(callees, self.of[instruction.name])

    def span(self, instruction: hlo.Instruction) -> _Span | None:
        return self.of.get(instruction.name)

    def _holds(self, callee: str, target: str | None) -> bool:
        """Whether a computation calls a target or, for None, has a collective."""
        body = self.program.computations[callee].values()
        return any(x.target == target if target else _kind(x) is not None for x in body)

    def _follow(self, start: hlo.Instruction) -> _Span:
        """From a start along its value to its done; to the end of the computation where that lies elsewhere."""
        chain, work, end = {start.name}, hlo.Work(), None
        names = list(self.computation)
        for name in names[names.index(start.name) + 1 :]:
            instruction = self.computation[name]
            callees = self.program.callees(instruction)
            if chain.intersection(instruction.operands):
                repeats = instruction.opcode == "fusion" and any(self._holds(x, None) for x in callees)
                self.repeats |= set(callees if repeats else ())
                if instruction.opcode.endswith("-done") or any(self._holds(x, "AsyncCollectiveDone") for x in callees):
                    end = name
                    break
                if instruction.opcode == "call-update":
                    work = hlo.Work()
                if repeats or instruction.opcode in _CARRIES_ON:
                    chain.add(name)
            work = work.plus(self.program.work_of(self.name, instruction))
        in_place = re.search(r'"is_sync\\?":\s*true', start.attributes)
        return _Span(end, work, not in_place)


def _collective(
    program: hlo.Program,
    sizes: Mapping[str, int] | None,
    name: str,
    instruction: hlo.Instruction,
    span: _Span | None,
) -> Collective:
    kind = _kind(instruction)
    assert kind
    if kind == "all-reduce" and name.startswith("all-reduce-scatter"):  # a TPU runs this fusion as one reduce-scatter
        kind = "reduce-scatter"
    arrays = program.shapes(name, instruction)
    total = sum(x.num_bytes for x in arrays)
    num_devices = program.num_devices or (math.prod(sizes.values()) if sizes else None)
    if kind == "collective-permute":
        axes, shift, group = topology.permuted_axes(
            topology.lists(instruction, "source_target_pairs"), sizes, num_devices
        )
        sent = total
    else:
        groups = topology.groups(instruction, num_devices)
        axes, shift, group = topology.grouped_axes(groups, sizes), None, max(len(x) for x in groups)
        # An all-gather's output is g times its operand: (g-1)/g of it is g-1 operands.
        parts = {"all-gather": (group - 1) * group, "all-reduce": 2 * (group - 1)}.get(kind, group - 1)
        sent = parts * total // group
    asynchronous = span is not None and span.asynchronous
    work = span.work if span and asynchronous and program.scheduled else None
    return Collective(
        kind=kind,
        dtype=next((x.dtype for x in arrays if x.num_bytes), "token"),
        axes=axes,
        shift=shift,
        participants=group,
        bytes=sent,
        runs=program.runs[name],
        conditional=program.conditional[name],
        asynchronous=asynchronous,
        hidden_flops=None if work is None else work.flops,
        hidden_kernels=0 if work is None else work.kernels,
        hidden=work is not None and any(work),
        scope=_scope(program, instruction),
    )


def _scope(program: hlo.Program, instruction: hlo.Instruction) -> str:
    """The name in JAX; a sum that is part of a fusion may have left it to the function that it adds with."""
    inner = (x for name in program.callees(instruction) for x in program.computations[name].values())
    named = (re.search(r'op_name="([^"]*)"', x.attributes) for x in (instruction, *inner))
    return next((x[1] for x in named if x), "")


def _copies(program: hlo.Program, name: str, spans: _Spans) -> int:
    """Copies in one run of a computation that read or write what one of its collectives sends or returns."""
    computation = program.computations[name]

    def origin(operand: str, path: tuple[int, ...] = ()) -> tuple[str, tuple[int, ...]]:
        """The instruction, and the element of its result, that a name stands for."""
        while (found := computation.get(operand)) is not None:
            if found.opcode == "bitcast":
                operand = found.operands[0]
            elif found.opcode == "get-tuple-element":
                operand, path = found.operands[0], (found.element, *path)
            elif found.opcode == "tuple" and path:
                operand, path = found.operands[path[0]], path[1:]
            else:
                break
        return operand, path

    sent, returned = set(), set()
    for instruction in computation.values():
        if not (_kind(instruction) or instruction.name in spans.of):
            continue
        span = spans.span(instruction)
        returned.add(span.end if span else instruction.name)
        for operand in instruction.operands:
            source = origin(operand)[0]
            parts = computation[source].operands if computation[source].opcode == "tuple" else [operand]
            sent |= {origin(x) for x in parts}
    total = 0
    for instruction in computation.values():
        read = _copied(program, computation, instruction)
        if read is not None:
            place = origin(read)
            total += place in sent or place[0] in returned or (instruction.name, ()) in sent
    return total


def _copied(program: hlo.Program, computation: hlo.Computation, instruction: hlo.Instruction) -> str | None:
    """What a copy reads, and a copy-done, and a fusion that only copies; None for all else."""
    if instruction.opcode == "copy":
        return instruction.operands[0]
    if instruction.opcode == "copy-done":
        return computation[instruction.operands[0]].operands[0]
    if instruction.opcode == "fusion":
        inner = program.computations[program.callees(instruction)[0]]
        working = [x for x in inner.values() if x.opcode not in ("parameter", "bitcast")]
        if [x.opcode for x in working] == ["copy"] and len(instruction.operands) == 1:
            return instruction.operands[0]
    return None
