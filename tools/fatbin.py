"""Which GPUs an ELF file has code for, as `cuobjdump --list-elf --list-ptx` prints them, without a toolkit.

nvcc puts one container for each source file into the section `.nv_fatbin`: a header (magic, version, bytes of the
header, bytes of what follows), and behind it an entry for each target (kind, version, bytes of the header, bytes of the
code, ..., at 28 the architecture). That is described nowhere: so what does not look like it is an error, and no guess.
"""

from __future__ import annotations

import struct

__all__ = ["section", "targets"]

_CONTAINER = struct.Struct("<IHHQ")
_CONTAINER_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<HHIQ12xI")
_ENTRY_KINDS = {1: "compute", 2: "sm"}  # PTX, which a driver compiles for GPUs as new or newer; machine code


def section(elf: bytes, name: str) -> bytes:
    """The bytes of a section of a 64-bit little-endian ELF file; b"" if it has no such section.

    Raises:
        ValueError: It is no such file.
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit little-endian ELF file")
    at, entry_bytes, count, names_index = (*struct.unpack_from("<Q", elf, 40), *struct.unpack_from("<HHH", elf, 58))
    headers = [struct.unpack_from("<I20xQQ", elf, at + i * entry_bytes) for i in range(count)]  # name, offset, bytes
    names = headers[names_index][1]
    for name_at, offset, nbytes in headers:
        if elf.startswith(name.encode() + b"\0", names + name_at):
            return elf[offset : offset + nbytes]
    return b""


def targets(elf: bytes) -> list[str]:
    """What the kernels in the file were compiled for, each once: "sm_90" is machine code, "compute_100" is PTX.

    In the order of `kvpool info`: machine code first, then PTX, each from the oldest to the newest.

    Raises:
        ValueError: It is no ELF file, or its containers look other than said above.
    """
    data = section(elf, ".nv_fatbin")
    found: set[tuple[int, int]] = set()
    at = 0
    while at + _CONTAINER.size <= len(data):
        magic, _, header_bytes, nbytes = _CONTAINER.unpack_from(data, at)
        if magic == 0:  # containers begin at multiples of 8
            at += 8
            continue
        if magic != _CONTAINER_MAGIC or at + header_bytes + nbytes > len(data):
            raise ValueError(f"no container of GPU code at {at} of .nv_fatbin: {magic:#x}, {nbytes} bytes")
        at += header_bytes
        end = at + nbytes
        while at < end:
            kind, _, entry_header_bytes, code_bytes, architecture = _ENTRY.unpack_from(data, at)
            if kind not in _ENTRY_KINDS or entry_header_bytes < _ENTRY.size:
                raise ValueError(f"no entry of GPU code at {at} of .nv_fatbin: kind {kind}")
            found.add((kind, architecture))
            at += entry_header_bytes + code_bytes
        if at != end:
            raise ValueError(f"an entry of GPU code ends at {at} of .nv_fatbin, its container at {end}")
    return [f"{_ENTRY_KINDS[kind]}_{architecture}" for kind, architecture in sorted(found, key=lambda e: (-e[0], e[1]))]
