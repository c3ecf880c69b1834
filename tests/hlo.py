"""What a compiled program does: collectives, copies, donated inputs, temporary memory.

    program = hlo.read(jax.jit(f).lower(*args).compile())
    program.launches()                     # {"all-to-all": 1}: times a run, trip counts of loops multiplied in
    program.received_bytes()               # bytes that one device receives in a run
    program.moves(at_least=2**20)          # copies, transposes and gathers that write 1 MiB or more
    program.read_bytes(lambda path: ...)   # bytes that one device reads of these arguments in a run
    program.product_flops()                # floating-point operations of one device's matrix products

The reader takes XLA's text, which is one device's program, as JAX 0.10 to 0.12 print it. Asynchronous pairs count once,
at their start; what stands in a branch counts as if it were taken; a collective within groups of one device counts not
at all. A loop whose trip count the program does not state has none (`count is None`).
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
MOVES = ("copy", "transpose", "gather", "concatenate")
"""Instructions that only move data."""

_TYPE_BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "f4e2m1fn": 4}
_TYPE = re.compile(r"\b(pred|token|opaque|[su]\d+|bf16|f\d+\w*|c\d+)\[([\d,<=]*)\]")
_NAME = re.compile(r"%?([\w.\-]+)")


Loops = int | Callable[[str], int] | None


@dataclass(frozen=True)
class Instruction:
    """One line of a program."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False
    literal: str = ""
    """What stands between the parentheses, for constants and parameters."""

    @property
    def bytes(self) -> int:
        """Bytes of the result, all parts of a tuple together."""
        return type_bytes(self.type)

    @property
    def source(self) -> str:
        """The JAX operation that it came from, with the scopes around it."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def called(self, attribute: str) -> list[str]:
        """The computations that an attribute names."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return _NAME.findall(found[1].strip("{}")) if found else []


@dataclass(frozen=True)
class Collective:
    """One collective instruction and how often a run executes it."""

    kind: str
    payload: int
    """Bytes of its result on one device (of its operand, for a reduce-scatter)."""
    group: int
    """Devices that take part together."""
    count: int | None
    """Executions a run; None where a loop around it has a count that only the run knows."""
    source: str
    sends_to_itself: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing travels."""
        return self.group == 1 or self.sends_to_itself

    @property
    def received(self) -> float:
        """Bytes that one device receives in one execution, by an algorithm that sends no byte twice."""
        share = (self.group - 1) / self.group
        return self.payload * {"all-reduce": 2 * share, "collective-permute": 1, "collective-broadcast": 1}.get(
            self.kind, share
        )


@dataclass(frozen=True)
class Move:
    """An instruction that writes a large result."""

    kind: str
    bytes: int
    count: int | None
    source: str
    name: str


def type_bytes(text: str) -> int:
    """Bytes of an HLO type, such as `f32[2,3]{1,0}` or a tuple of them."""
    bits = 0
    for name, sizes in _TYPE.findall(text):
        digits = re.search(r"\d+", name)
        width = _TYPE_BITS[name] if name in _TYPE_BITS else int(digits[0]) if digits else 8
        bits += width * math.prod(int(size.lstrip("<=")) for size in sizes.split(",") if size)
    return math.ceil(bits / 8)


@dataclass(frozen=True)
class Program:
    """A compiled program of one device."""

    text: str
    temporary_bytes: int | None = None
    """Bytes of temporary buffers a device; None when read from text alone."""
    alias_bytes: int | None = None
    """Bytes of outputs that are written into donated inputs."""
    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict, repr=False)
    entry: str = ""
    loops: "Loops" = None
    """Iterations to take for each loop whose count the program does not state."""

    @cached_property
    def counts(self) -> dict[str, int | None]:
        """How often each computation runs, those of fusions included; None where only the run knows."""
        total: dict[str, int | None] = {}

        def visit(name: str, times: int | None) -> None:
            total[name] = None if times is None or total.get(name, 0) is None else (total.get(name) or 0) + times
            for instruction in self.computations[name].values():
                for called, trips in self._calls(name, instruction):
                    visit(called, None if times is None or trips is None else times * trips)

        visit(self.entry, 1)
        return total

    def _calls(self, computation: str, instruction: Instruction) -> Iterator[tuple[str, int | None]]:
        if instruction.opcode in ("async-update", "async-done"):
            return
        if instruction.opcode == "while":
            trips = self.trip_count(computation, instruction)
            if trips is None:
                trips = self.loops(instruction.source) if callable(self.loops) else self.loops
            for body in instruction.called("body"):
                yield body, trips
            for condition in instruction.called("condition"):
                yield condition, None if trips is None else trips + 1
            return
        attributes = ("calls", "branch_computations", "true_computation", "false_computation", "called_computations")
        if instruction.opcode == "call":
            attributes += ("to_apply",)
        for attribute in attributes:
            for called in instruction.called(attribute):
                if called in self.computations:
                    yield called, 1

    def trip_count(self, computation: str, loop: Instruction) -> int | None:
        """Iterations of a while loop: as the compiler noted, else from its counter's start, step and bound."""
        noted = re.search(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)', loop.attributes)
        if noted:
            return int(noted[1])
        condition, body = loop.called("condition")[0], loop.called("body")[0]
        test = self._root_of(condition)
        if test is None or test[0].opcode != "compare":
            return None
        compare, (left, right) = test
        direction = re.search(r"direction=(\w+)", compare.attributes)
        bound, index = self._constant(condition, right), self._element(condition, left)
        if bound is None or index is None or direction is None:
            return None
        start = self._constant(computation, self._operand_of_tuple(computation, loop.operands[0], index))
        root = next(x for x in self.computations[body].values() if x.is_root)
        update = self._root_of(body, root.operands[index] if root.opcode == "tuple" else None)
        if start is None or update is None or update[0].opcode != "add":
            return None
        steps = [self._constant(body, operand) for operand in update[1]]
        own = [self._element(body, operand) == index for operand in update[1]]
        step = steps[1] if own[0] else steps[0] if own[1] else None
        if not step:
            return None
        reach = {"LT": bound - start, "LE": bound - start + 1, "GT": start - bound, "GE": start - bound + 1}
        if direction[1] not in reach or (step > 0) != (direction[1] in ("LT", "LE")):
            return None
        return max(0, math.ceil(reach[direction[1]] / abs(step)))

    def _root_of(self, computation: str, name: str | None = None) -> tuple[Instruction, tuple[str, ...]] | None:
        """The instruction that computes a value and its operands' names out here, looking through one fusion."""
        inside = self.computations[computation]
        made = inside.get(name) if name else next((x for x in inside.values() if x.is_root), None)
        if made is None or made.opcode not in ("fusion", "call"):
            return None if made is None else (made, made.operands)
        fused = self.computations[(made.called("calls") or made.called("to_apply"))[0]]
        root = next(x for x in fused.values() if x.is_root)
        outer = []
        for operand in root.operands:
            source = fused[operand]
            outer.append(made.operands[int(source.literal)] if source.opcode == "parameter" else operand)
        return root, tuple(outer)

    def _constant(self, computation: str, name: str | None) -> int | None:
        found = self.computations[computation].get(name or "")
        if found is None:
            # A constant that a fusion holds itself.
            found = next((inside[name] for inside in self.computations.values() if name in inside), None)
        while found is not None and found.opcode in ("copy", "convert", "bitcast"):
            found = self.computations[computation].get(found.operands[0])
        if found is None or found.opcode != "constant" or not re.fullmatch(r"-?\d+", found.literal):
            return None
        return int(found.literal)

    def _element(self, computation: str, name: str) -> int | None:
        """The place in the loop's tuple that a value is read from."""
        found = self.computations[computation].get(name)
        while found is not None and found.opcode in ("copy", "bitcast"):
            found = self.computations[computation].get(found.operands[0])
        if found is None or found.opcode != "get-tuple-element":
            return None
        index = re.search(r"index=(\d+)", found.attributes)
        return int(index[1]) if index else None

    def _operand_of_tuple(self, computation: str, name: str, index: int) -> str | None:
        made = self.computations[computation].get(name)
        return made.operands[index] if made is not None and made.opcode == "tuple" else None

    @cached_property
    def collectives(self) -> list[Collective]:
        """Every collective over groups of more than one device."""
        found = []
        for name, count in self.counts.items():
            for instruction in self.computations[name].values():
                kind = instruction.opcode.removesuffix("-start")
                if kind in COLLECTIVES:
                    collective = self._collective(kind, instruction, count)
                    if not collective.is_idle and count != 0:
                        found.append(collective)
        return found

    def _collective(self, kind: str, instruction: Instruction, count: int | None) -> Collective:
        payload = instruction.bytes
        if instruction.opcode.endswith("-start") and kind != "all-reduce":
            payload = type_bytes(_result_of_start(instruction.type))
        pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", instruction.attributes)
        group, itself = 0, False
        if pairs:
            ends = [pair.split(",") for pair in re.findall(r"\d+,\d+", pairs[1])]
            group, itself = len(ends) or 1, all(source == target for source, target in ends)
        group = group or self._group(instruction.attributes)
        if kind == "reduce-scatter":
            payload *= group
        return Collective(kind, payload, group, count, instruction.source, itself)

    def _group(self, attributes: str) -> int:
        """Devices a group, from any of the forms in which XLA prints replica groups."""
        mesh = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
        if mesh:
            sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
            size = 1
            for name, part in re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2]):
                size *= int(part) if part else sizes[name]
            return size
        counted = re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes)
        if counted:
            return int(counted[1])
        listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
        if listed:
            return listed[1].count(",") + 1
        return math.prod(
            int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", self.text.split("\n")[0])
        )

    def launches(self, *, loops: int | None = None) -> dict[str, int]:
        """Executions of each kind of collective in one run.

        `loops` stands for the executions of what lies in loops whose count the program does not state; without it such
        a collective raises ValueError.
        """
        total: Counter[str] = Counter()
        for collective in self.collectives:
            total[collective.kind] += _times(collective, loops)
        return dict(total)

    def received_bytes(self, *, loops: int | None = None) -> int:
        """Bytes that one device receives in one run."""
        return round(sum(collective.received * _times(collective, loops) for collective in self.collectives))

    def read_bytes(self, which: Callable[[str], bool], *, small: int = 2**20) -> float:
        """Bytes that one device reads in one run of the arguments whose path (`kept.weight`) `which` picks.

        Counted operand by operand: all of it, or what a slice or a gather returns; a copy of an argument counts again
        where it is used, unless it has `small` bytes at most, which stay in the processor's cache.
        Raises ValueError where an argument is read in a loop of unknown count.
        """
        picked = [which(self.parameters[number].source) for number in sorted(self.parameters)]
        return _Reads(self, small).visit(self.entry, picked)[1]

    def product_flops(self) -> int:
        """Floating-point operations of one device's matrix products in one run, two for each multiplication."""
        total = 0
        for name, count in self.counts.items():
            inside = self.computations[name]
            for x in inside.values():
                if x.opcode != "dot" or count == 0:
                    continue
                if count is None:
                    raise ValueError(f"dot ({x.source}) lies in a loop of unknown count: give loops=")
                (_, sizes), *_ = _TYPE.findall(inside[x.operands[0]].type)
                contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.attributes)
                places = [int(n) for n in contracted[1].split(",") if n] if contracted else []
                depth = math.prod(int(sizes.split(",")[place]) for place in places)
                (_, result), *_ = _TYPE.findall(x.type)
                total += 2 * depth * math.prod(int(n) for n in result.split(",") if n) * count
        return total

    def moves(self, *, at_least: int, kinds: tuple[str, ...] = MOVES) -> list[Move]:
        """Instructions of `kinds` that write `at_least` bytes; inside a fusion, where its own result is as large."""
        found = []
        fused = {called for name, _, called in self._fusions()}
        for name, count in self.counts.items():
            if name not in fused:
                found += self._large(name, count, at_least, kinds)
        for caller, fusion, called in self._fusions():
            if fusion.bytes >= at_least:
                found += self._large(called, self.counts[caller], at_least, kinds)
        return found

    def _fusions(self) -> Iterator[tuple[str, Instruction, str]]:
        for name in self.counts:
            for instruction in self.computations[name].values():
                if instruction.opcode == "fusion":
                    yield name, instruction, instruction.called("calls")[0]

    def _large(self, name: str, count: int | None, at_least: int, kinds: tuple[str, ...]) -> list[Move]:
        found = []
        for x in self.computations[name].values():
            kind = x.opcode.removesuffix("-start")
            size = type_bytes(_result_of_start(x.type)) if x.opcode.endswith("-start") else x.bytes
            if kind in kinds and size >= at_least:
                found.append(Move(kind, size, count, x.source, x.name))
        return found

    @cached_property
    def aliases(self) -> dict[tuple[int, ...], int]:
        """Outputs (their place in the result) that are written into donated inputs (the parameter's number)."""
        found = re.search(r"input_output_alias=\{(.*?)\}, (?:\w+=|\n)", self.text.split("\n")[0] + ", \n")
        pairs = re.findall(r"\{([\d, ]*)\}: \((\d+), ", found[1]) if found else []
        return {tuple(int(n) for n in place.split(",") if n.strip()): int(number) for place, number in pairs}

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The inputs, by number; `source` is the path of the argument they came from."""
        entry = self.computations[self.entry].values()
        return {int(x.literal): x for x in entry if x.opcode == "parameter"}


class _Reads:
    """Follows some of a program's arguments to where they are read.

    A value is what these stand for: True for an array that is one of the arguments or a part of it moved elsewhere,
    False for any other, a list for a tuple. Moving data reads it, and what was moved is read once more where it is used
    ("small" results of a move stay in the processor's cache, and are read there).
    """

    VIEWS = ("bitcast", "reshape", "optimization-barrier", "copy-done", "all-gather-done")
    MOVED = (*MOVES, "convert", "slice", "dynamic-slice", "pad", "reverse", "select", "all-gather", "broadcast")
    PARTS = ("slice", "dynamic-slice", "gather")
    """They read no more of their first operand than they return."""
    WRITES = ("dynamic-update-slice", "scatter")
    """They write a part of their first operand, in place."""

    def __init__(self, program: Program, small: int):
        self.program, self.small = program, small

    def visit(self, name: str, arguments: list, fused: bool = False) -> tuple[object, float]:
        """What a computation returns for these values of its parameters, and the bytes that it reads.

        In a fusion only parameters lie in memory: each is read once at most, whoever uses it.
        """
        inside = self.program.computations[name]
        values, total, result = {}, 0, False
        in_memory: dict[str, float] = {}
        for x in inside.values():
            kind = x.opcode.removesuffix("-start")
            operands = [values.get(operand, False) for operand in x.operands]
            if x.opcode == "parameter":
                values[x.name] = arguments[int(x.literal)]
                in_memory[x.name] = 0
            elif x.opcode == "tuple":
                values[x.name] = operands
            elif x.opcode == "get-tuple-element":
                index = int(re.search(r"index=(\d+)", x.attributes)[1])  # pyright: ignore[reportOptionalSubscript]
                values[x.name] = operands[0][index] if isinstance(operands[0], list) else operands[0]
            elif kind in self.VIEWS:
                values[x.name] = operands[0]
                if fused and x.operands[0] in in_memory:
                    in_memory[x.name] = 0
            elif x.opcode in ("while", "call", "fusion", "conditional"):
                values[x.name], read = self._call(x, name, operands)
                total += read
            else:
                for place, (operand, value) in enumerate(zip(x.operands, operands, strict=True)):
                    if value is True and not (kind in self.WRITES and place == 0):
                        part = kind in self.PARTS and place == 0
                        size = x.bytes if part else inside[operand].bytes
                        if not fused:
                            total += size
                        elif operand in in_memory:
                            in_memory[operand] = min(in_memory[operand] + size, inside[operand].bytes)
                moved = kind in self.WRITES and operands[0] is True
                if kind in self.MOVED and True in operands:
                    moved = fused or x.bytes > self.small
                values[x.name] = moved
            if x.is_root:
                result = values[x.name]
        return result, total + sum(in_memory.values())

    def _call(self, x: Instruction, name: str, operands: list) -> tuple[object, float]:
        if x.opcode == "fusion":
            result, read = self.visit(x.called("calls")[0], operands, fused=True)
            written = any(
                inside.is_root and inside.opcode in self.WRITES
                for inside in self.program.computations[x.called("calls")[0]].values()
            )
            return (result if isinstance(result, list) else result and (written or x.bytes > self.small)), read
        arguments = operands[1:] if x.opcode == "conditional" else operands
        result, total = False, 0.0
        for place, (called, trips) in enumerate(self.program._calls(name, x)):
            made, read = self.visit(called, [arguments[place]] if x.opcode == "conditional" else arguments)
            # A loop's carry stands for what it stood for before the loop.
            result = operands[0] if x.opcode == "while" else made
            if trips is None and read:
                raise ValueError(f"a loop of unknown count ({x.source}): give loops=")
            total += (trips or 0) * read
        return result, total


def largest_beside(program: Program, size: int) -> int:
    """The most numbers that any result holds for each step along a dim of `size`; 0 where none has such a dim.

    Which says whether an array of that dim and another large one exists, whatever the other dims and their order.
    """
    found = [0]
    for instructions in program.computations.values():
        for instruction in instructions.values():
            for _, dims in _TYPE.findall(instruction.type):
                sizes = [int(dim.lstrip("<=")) for dim in dims.split(",") if dim]
                if size in sizes:
                    found.append(math.prod(sizes) // size)
    return max(found)


def _times(collective: Collective, loops: int | None) -> int:
    count = collective.count if collective.count is not None else loops
    if count is None:
        raise ValueError(f"{collective.kind} ({collective.source}) lies in a loop of unknown count: give loops=")
    return count


def _result_of_start(type_text: str) -> str:
    """The type that an asynchronous start will deliver: the second part of (operands, results, ...)."""
    parts = _split(type_text[1:-1]) if type_text.startswith("(") else [type_text]
    return parts[1] if len(parts) > 1 else parts[0]


def _split(text: str) -> list[str]:
    """Parts between the commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [part for part in (*parts, text[start:].strip()) if part]


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes; brackets within quotes are text."""
    depth, quoted = 0, False
    for at in range(start, len(text)):
        if text[at] == '"' and text[at - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (text[at] == "(") - (text[at] == ")")
            if depth == 0:
                return at
    raise ValueError(f"no closing bracket: {text[start : start + 80]}")


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = re.sub(r"/\*.*?\*/", "", line[head.end() :])
    if rest.startswith("("):
        end = _closing(rest, 0) + 1
    else:
        end = rest.index(" ")
    type_text, rest = rest[:end], rest[end:].strip()
    opcode = re.match(r"[\w\-]+", rest)
    if opcode is None or rest[opcode.end()] != "(":
        return None
    close = _closing(rest, opcode.end())
    inside = rest[opcode.end() + 1 : close]
    # Older texts print each operand's type before its name.
    operands = tuple(part.split(" ")[-1].lstrip("%") for part in _split(inside))
    return Instruction(head[2], opcode[0], type_text, operands, rest[close + 1 :], bool(head[1]), inside.strip())


def read(compiled, *, loops: Loops = None) -> Program:
    """The program of a compiled function (`jax.jit(f).lower(...).compile()`), or of its text.

    `loops` is what to take for the iterations of each loop whose count only the run knows: one number for all, or a
    function of the loop's `source`.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    memory = None if isinstance(compiled, str) else compiled.memory_analysis()
    computations: dict[str, dict[str, Instruction]] = {}
    entry, inside = "", None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if inside is None and head and " -> " in line:
            inside = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            inside = None
        elif inside is not None:
            instruction = _instruction(line)
            if instruction is not None:
                inside[instruction.name] = instruction
    assert entry, "no entry computation: this is not the text of a compiled program"
    return Program(
        text,
        None if memory is None else memory.temp_size_in_bytes,
        None if memory is None else memory.alias_size_in_bytes,
        computations,
        entry,
        loops,
    )
