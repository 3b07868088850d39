"""Which devices a collective joins, and the mesh axes that says.

What always holds: device numbers in a program are places in the mesh, row by row, whatever the ids of its devices. So
groups of places name axes: on ``(data=2, sequence=4)`` the rows {0 1 2 3} {4 5 6 7} are ``sequence``, the columns {0 4}
{1 5} {2 6} {3 7} are ``data``, and {0 1} {2 3} {4 5} {6 7} are ``sequence[2]``, groups of 2 within that axis. Groups
that follow no axis get no name.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

from ring_jax import hlo


def lists(instruction: hlo.Instruction, name: str) -> list[tuple[int, ...]]:
    """``name={{0,1},{2,3}}`` as numbers."""
    found = re.search(rf"{name}=\{{((?:\{{[\d,]*\}},?)*)\}}", instruction.attributes)
    lists = re.findall(r"\{([\d,]+)\}", found[1]) if found else []
    return [tuple(int(n) for n in x.split(",")) for x in lists]


def _iota(text: str) -> np.ndarray:
    """``[4,2]<=[8]`` or ``[2,4]<=[4,2]T(1,0)``: numbers 0.. in the second shape, transposed, then in the first."""
    found = re.match(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", text)
    assert found, text
    shape, source, order = ([int(n) for n in x.split(",")] if x else [] for x in found.groups())
    numbers = np.arange(math.prod(shape)).reshape(source or shape)
    numbers = numbers.transpose(order) if order else numbers
    return numbers.reshape(shape) if source else numbers


def groups(instruction: hlo.Instruction, num_devices: int | None) -> list[tuple[int, ...]]:
    """Who takes part with whom, from any of the forms of ``replica_groups``; none given means all devices."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\](.*?) \{([^}]*)\}", instruction.attributes)
    iota = re.search(r"replica_groups=(\[\S+?\]<=\[[\d,]+\](?:T\([\d,]+\))?)", instruction.attributes)
    if iota:
        return [tuple(x) for x in _iota(iota[1]).tolist()]
    if not mesh:
        groups = lists(instruction, "replica_groups")
        if not groups and num_devices is None:
            raise ValueError(f"{instruction.name} is over all devices and the text says not how many; pass the mesh")
        return groups or [tuple(range(num_devices or 0))]
    names, extents = zip(*re.findall(r"'([^']*)'=(\d+)", mesh[1]), strict=True)
    sizes = {name: int(n) for name, n in zip(names, extents, strict=True)}
    given = re.search(r"device_ids=\((.*)\)", mesh[2])
    ids = np.arange(math.prod(sizes.values()))
    if given:
        ids = _iota(given[1]).ravel() if given[1].startswith("[") else np.array([int(n) for n in given[1].split(",")])
    shape, together = [], []
    taken = {name: (int(a or 1), int(b or 0)) for name, a, b in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", mesh[3])}
    for name, size in sizes.items():
        before, part = taken.get(name, (1, 1))
        part = part or size
        together += [len(shape) + 1] if name in taken else []
        shape += [before, part, size // before // part]
    split = np.moveaxis(ids.reshape(shape), together, range(-len(together), 0))
    return [tuple(x) for x in split.reshape(-1, math.prod(shape[i] for i in together)).tolist()]


def grouped_axes(groups: list[tuple[int, ...]], sizes: Mapping[str, int] | None) -> tuple[str, ...] | None:
    """The axes whose lines the groups are, or the one axis that they divide; None where there are none such."""
    if sizes is None:
        return None
    names, ids = list(sizes), np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    wide = [i for i, name in enumerate(names) if sizes[name] > 1]
    given = {frozenset(x) for x in groups}
    for chosen in itertools.chain.from_iterable(itertools.combinations(wide, r) for r in range(len(wide) + 1)):
        lines = np.moveaxis(ids, chosen, range(-len(chosen), 0)).reshape(-1, math.prod(ids.shape[i] for i in chosen))
        if given == {frozenset(x) for x in lines.tolist()}:
            return tuple(names[i] for i in chosen)
    places = [np.stack(np.unravel_index(np.array(x), ids.shape)) for x in groups]
    for axis in wide:
        if len({len(x) for x in groups}) == 1 and all(
            (np.delete(x, axis, 0).T == np.delete(x, axis, 0)[:, 0]).all() for x in places
        ):
            return (f"{names[axis]}[{len(groups[0])}]",)
    return None


def permuted_axes(
    pairs: list[tuple[int, ...]], sizes: Mapping[str, int] | None, num_devices: int | None
) -> tuple[tuple[str, ...] | None, int | None, int]:
    """(axes, shift, participants) of a permute: the axes along which its pairs move, in blocks as large as can be."""
    if not pairs:
        return (None if sizes is None else ()), None, 1
    known = sizes or {"": num_devices or 1 + max(itertools.chain(*pairs))}
    shape = tuple(known.values())
    source, target = (np.stack(np.unravel_index(np.array(x), shape)) for x in zip(*pairs, strict=True))
    moved = [i for i in range(len(shape)) if (source[i] != target[i]).any()]
    if not moved:
        return (None if sizes is None else ()), None, 1
    extent = tuple(shape[i] for i in moved)
    start, stop = (np.ravel_multi_index(tuple(x[moved]), extent) for x in (source, target))
    size, every = math.prod(extent), len(pairs) == math.prod(shape)
    blocks = [n for n in range(size, 1, -1) if size % n == 0 and (start // n == stop // n).all()]
    shifts = {n: np.unique((stop - start) % n) for n in blocks}
    block = next((n for n in blocks if every and len(shifts[n]) == 1), blocks[-1])
    shift = int(shifts[block][0]) if every and len(shifts[block]) == 1 else None
    if sizes is None:
        return None, shift, _largest_component(pairs)
    names = tuple(list(known)[i] for i in moved)
    if block == size:
        return names, shift, block
    return ((f"{names[0]}[{block}]",) if len(names) == 1 else None), shift, block


def _largest_component(pairs: Iterable[tuple[int, ...]]) -> int:
    groups: list[set[int]] = []
    for pair in pairs:
        touching = [x for x in groups if x & set(pair)]
        groups = [x for x in groups if not x & set(pair)] + [set(pair).union(*touching)]
    return max(len(x) for x in groups)
