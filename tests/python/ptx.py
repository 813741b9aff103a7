"""An interpreter of PTX, as far as kvpool's kernels use it: what nvcc made of them runs on the CPU.

The text becomes steps, which ptx_machine.py executes. An instruction that is not known here raises PtxError when the
text is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from ptx_machine import END, PARAMETERS, Branch, Kernel, Lanes, Launch, Step, Values

__all__ = ["PtxError", "parse"]

_SPECIAL = ("%tid.x", "%ctaid.x", "%nctaid.x")


class PtxError(Exception):
    """The text has something that this interpreter does not know."""


_ENTRY = re.compile(r"\.entry (\w+)\(\s*\.param \.align \d+ \.b8 \w+\[(\d+)\]\s*\)(.*?)\n\{\n(.*?)\n\}", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of a PTX text, by name. Raises PtxError."""
    kernels = {}
    for name, nbytes, _, body in _ENTRY.findall(text):
        kernels[name] = _parse_body(name, int(nbytes), body)
    if len(kernels) != text.count(".entry"):
        raise PtxError("there is an entry of another form")
    return kernels


def _parse_body(name: str, nbytes: int, body: str) -> Kernel:
    labels: dict[str, int] = {}
    lines: list[str] = []
    for raw in re.sub(r"//[^\n]*", "", body).replace(";", ";\n").split("\n"):
        line = raw.strip().rstrip(";").strip()
        if not line or line.startswith((".reg", ".pragma", ".loc")):
            continue
        if line.endswith(":"):
            labels[line[:-1]] = len(lines)
        elif line not in ("{", "}"):
            lines.append(line)
    steps: list[Step | Branch] = []
    opcodes = []
    for line in lines:
        match = _INSTRUCTION.fullmatch(line)
        if match is None:
            raise PtxError(f"not an instruction: {line}")
        negated, predicate, opcode, rest = match.groups()
        opcodes.append(opcode)
        operands = _OPERAND.findall(rest)
        if opcode in ("bra", "bra.uni"):
            steps.append(Branch(labels[operands[0]], predicate, bool(negated)))
        elif opcode == "ret":
            steps.append(Branch(END, predicate, bool(negated)))
        elif predicate is not None:
            steps.append(_only_where(predicate, bool(negated), _decode(line, opcode, operands)))
        else:
            steps.append(_decode(line, opcode, operands))
    return Kernel(name, nbytes, steps, set(labels.values()), opcodes)


def _only_where(predicate: str, negated: bool, step: Step) -> Step:
    def guarded(launch: Launch, lanes: Lanes) -> None:
        lanes = lanes[(launch.read(predicate, lanes) != 0) != negated]
        if len(lanes):
            step(launch, lanes)

    return guarded


def _source(operand: str) -> Callable[[Launch, Lanes], Values]:
    """A register, a constant, or the place of the arguments."""
    if operand in _SPECIAL or re.fullmatch(r"%(p|r|rd|rs|f|fd)\d+", operand):
        return lambda launch, lanes: launch.read(operand, lanes)
    if re.fullmatch(r"0f[0-9A-Fa-f]{8}", operand):
        constant = int(operand[2:], 16)
    elif re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", operand):
        constant = int(operand, 0) & 0xFFFF_FFFF_FFFF_FFFF
    elif operand.endswith("_param_0"):
        constant = PARAMETERS
    else:
        raise PtxError(f"not an operand: {operand}")
    return lambda launch, lanes: np.full(len(lanes), constant, np.uint64)


def _address(operand: str) -> Callable[[Launch, Lanes], Values]:
    base, _, offset = operand.strip("[]").partition("+")
    find, add = _source(base), np.uint64(int(offset or 0) & 0xFFFF_FFFF_FFFF_FFFF)
    return lambda launch, lanes: find(launch, lanes) + add


def _bits(kind: str) -> int:
    return 1 if kind == "pred" else int(kind[1:])


def _cut(values: Values, bits: int) -> Values:
    return values if bits == 64 else values & np.uint64((1 << bits) - 1)


def _signed(values: Values, bits: int) -> np.ndarray:
    shift = np.uint64(64 - bits)
    return (values << shift).view(np.int64) >> np.int64(64 - bits)


def _floats(values: Values) -> np.ndarray:
    return values.astype(np.uint32).view(np.float32)


def _of_floats(floats: np.ndarray) -> Values:
    return floats.view(np.uint32).astype(np.uint64)


def _mul_wide(x: Values, y: Values, _bits: int) -> Values:
    return x * y


def _mul_high(x: Values, y: Values, bits: int) -> Values:
    return x * y >> np.uint64(bits)


def _left(x: Values, y: Values, bits: int) -> Values:
    return np.where(y < np.uint64(bits), x << np.minimum(y, np.uint64(63)), np.uint64(0))


def _right(x: Values, y: Values, bits: int) -> Values:
    return np.where(y < np.uint64(bits), x >> np.minimum(y, np.uint64(63)), np.uint64(0))


# Of two operands: the names with all types that are right for them.
_BINARY: dict[str, Callable[[Values, Values, int], Values]] = {
    **{f"add.{t}": lambda x, y, _: x + y for t in ("s32", "s64", "u32", "u64", "s16", "u16")},
    **{f"sub.{t}": lambda x, y, _: x - y for t in ("s32", "s64", "u32", "u64", "s16", "u16")},
    **{f"mul.lo.{t}": lambda x, y, _: x * y for t in ("s32", "s64", "u32", "u64", "s16", "u16")},
    **{f"and.{t}": lambda x, y, _: x & y for t in ("b16", "b32", "b64", "pred")},
    **{f"or.{t}": lambda x, y, _: x | y for t in ("b16", "b32", "b64", "pred")},
    **{f"xor.{t}": lambda x, y, _: x ^ y for t in ("b16", "b32", "b64", "pred")},
    **{f"min.{t}": lambda x, y, _: np.minimum(x, y) for t in ("u16", "u32", "u64")},
    **{f"max.{t}": lambda x, y, _: np.maximum(x, y) for t in ("u16", "u32", "u64")},
    "mul.hi.u32": _mul_high,
    **{f"shl.{t}": _left for t in ("b16", "b32", "b64")},
    **{f"shr.{t}": _right for t in ("u16", "u32", "u64", "b16", "b32", "b64")},
}  # fmt: skip
_FLOAT = {"add.f32": np.add, "sub.f32": np.subtract, "mul.f32": np.multiply}
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _decode(line: str, opcode: str, operands: list[str]) -> Step:
    parts = opcode.split(".")
    if parts[0] in ("ld", "st"):
        return _decode_access(line, parts, operands)
    if any(one.startswith(("{", "[")) for one in operands):
        return _decode_vector_move(line, parts, operands)
    target, *rest = operands
    find = [_source(one) for one in rest]
    compute = _computation(line, opcode, parts, len(rest))

    def step(launch: Launch, lanes: Lanes) -> None:
        launch.write(target, lanes, compute([one(launch, lanes) for one in find]))

    return step


def _computation(line: str, opcode: str, parts: list[str], count: int) -> Callable[[list[Values]], Values]:
    kind = parts[-1]
    if opcode in _BINARY and count == 2:
        function, bits = _BINARY[opcode], _bits(kind)
        shifts = parts[0] in ("shl", "shr")  # their second operand has 32 bits, whatever the first one has
        return lambda v: _cut(function(_cut(v[0], bits), _cut(v[1], 32 if shifts else bits), bits), bits)
    if opcode == "mul.wide.u32" and count == 2:
        return lambda v: _mul_wide(_cut(v[0], 32), _cut(v[1], 32), 64)
    if opcode in _FLOAT and count == 2:
        operation = _FLOAT[opcode]
        return lambda v: _of_floats(_quietly(operation, _floats(v[0]), _floats(v[1])))
    if parts[0] == "setp" and len(parts) == 3 and parts[1] in _COMPARE and count == 2 and kind[0] in "usb":
        compare, bits = _COMPARE[parts[1]], _bits(kind)
        if kind[0] == "s":
            return lambda v: compare(_signed(v[0], bits), _signed(v[1], bits)).astype(np.uint64)
        return lambda v: compare(_cut(v[0], bits), _cut(v[1], bits)).astype(np.uint64)
    if parts[0] == "selp" and len(parts) == 2 and count == 3:
        return lambda v: _cut(np.where(v[2] != 0, v[0], v[1]), _bits(kind))
    if ((parts[0] == "mov" and len(parts) == 2) or opcode == "cvta.to.global.u64") and count == 1:
        return lambda v: _cut(v[0], _bits(kind))
    if re.fullmatch(r"cvt\.u\d+\.u\d+", opcode) and count == 1:
        return lambda v: _cut(v[0], min(_bits(parts[1]), _bits(kind)))
    if opcode == "bfi.b32" and count == 4:
        return _insert_bits
    if opcode == "prmt.b32" and count == 3:
        return _permute_bytes
    raise PtxError(f"an instruction that this interpreter does not know: {line}")


def _quietly(operation: np.ufunc, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(operation(x, y), np.float32)


def _insert_bits(v: list[Values]) -> Values:
    inserted, into, position, length = v
    mask = _cut((np.uint64(1) << np.minimum(length, np.uint64(32))) - np.uint64(1) << position, 32)
    return _cut(into & ~mask | inserted << position & mask, 32)


def _permute_bytes(v: list[Values]) -> Values:
    both = _cut(v[1], 32) << np.uint64(32) | _cut(v[0], 32)
    result = np.zeros(len(both), np.uint64)
    for i in range(4):
        choice = v[2] >> np.uint64(4 * i)
        byte = both >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        result |= np.where(choice & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return result


def _names(operand: str) -> list[str]:
    return [one.strip() for one in operand.strip("{}").split(",")]


def _decode_vector_move(line: str, parts: list[str], operands: list[str]) -> Step:
    if parts[0] != "mov" or len(parts) != 2 or len(operands) != 2:
        raise PtxError(f"an instruction that this interpreter does not know: {line}")
    target, source = operands
    if source.startswith("{"):
        find = [_source(one) for one in _names(source)]
        width = _bits(parts[1]) // len(find)

        def pack(launch: Launch, lanes: Lanes) -> None:
            packed = np.zeros(len(lanes), np.uint64)
            for i, one in enumerate(find):
                packed |= _cut(one(launch, lanes), width) << np.uint64(i * width)
            launch.write(target, lanes, packed)

        return pack
    names, whole = _names(target), _source(source)
    width = _bits(parts[1]) // len(names)

    def unpack(launch: Launch, lanes: Lanes) -> None:
        values = whole(launch, lanes)
        for i, name in enumerate(names):
            launch.write(name, lanes, _cut(values >> np.uint64(i * width), width))

    return unpack


def _decode_access(line: str, parts: list[str], operands: list[str]) -> Step:
    known = r"(ld\.param|ld\.global(\.nc(\.L1::no_allocate)?)?|st\.global(\.cs)?)(\.v[24])?\.[bufs](8|16|32|64)"
    if not re.fullmatch(known, ".".join(parts)) or len(operands) != 2:
        raise PtxError(f"an instruction that this interpreter does not know: {line}")
    if parts[-1][0] == "s" and _bits(parts[-1]) < 32:
        raise PtxError(f"a load that extends a sign: {line}")
    nbytes = _bits(parts[-1]) // 8
    loads, of_arguments = parts[0] == "ld", parts[1] == "param"
    place, vector = operands[::-1] if loads else operands
    names, address, numbers = _names(vector), _address(place), np.dtype(f"<u{nbytes}")
    if len(names) != next((int(one[1]) for one in parts if re.fullmatch(r"v\d", one)), 1):
        raise PtxError(f"a vector of another length: {line}")

    def load(launch: Launch, lanes: Lanes) -> None:
        memory = launch.parameters if of_arguments else launch.memory
        rows = memory.load(address(launch, lanes), nbytes * len(names)).view(numbers)
        for i, name in enumerate(names):
            launch.write(name, lanes, rows[:, i].astype(np.uint64))

    find = [] if loads else [_source(one) for one in names]

    def store(launch: Launch, lanes: Lanes) -> None:
        rows = np.empty((len(lanes), len(names)), numbers)
        for i, one in enumerate(find):
            rows[:, i] = _cut(one(launch, lanes), 8 * nbytes).astype(numbers)
        launch.memory.store(address(launch, lanes), rows.view(np.uint8))

    return load if loads else store
