"""The kernels as nvcc compiles them, interpreted on the CPU: every byte agrees with the reference, for all kernels.

Random jobs, which the library's planner cuts into launches (tests/cpp/kernel_jobs). No GPU is needed, but nvcc.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit import LONG
from ptx import PtxError, parse
from ptx_machine import Fault, Kernel, Memory, run

ROOT = Path(__file__).resolve().parents[3]
TARGET = "sm_80"  # the lowest one: nvcc's output for the others is the same
JOBS = 1000 if LONG else 48
HEADER_BYTES = 32
TABLE_AT = 1 << 50  # of a table in the device's memory
UNITS = {16: "8CopyWorkINS0_6Unit16", 4: "8CopyWorkIj", 1: "8CopyWorkIh"}
TABLES = {"small": "11InlineTableILm4000", "large": "11InlineTableILm31744", "in memory": "11RemoteTable"}


@dataclass
class Launch:
    width: int
    header: bytes
    data: bytes


@dataclass
class Job:
    source_at: int
    source: bytes
    target_at: int
    before: bytes
    after: bytes
    launches: list[Launch]


def read_jobs(stream: io.BytesIO, count: int) -> Iterator[Job]:
    def number() -> int:
        return int(struct.unpack("=Q", stream.read(8))[0])

    def content() -> bytes:
        return stream.read(number())

    for _ in range(count):
        places = number(), content(), number(), content(), content()
        yield Job(*places, [Launch(number(), content(), content()) for _ in range(number())])


def nvcc() -> str:
    found = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if not found:
        pytest.skip("no nvcc")
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("ptx") / "kernels.ptx"
    command = [nvcc(), "-std=c++20", f"-I{ROOT}/cuda", f"-I{ROOT}/cpp", "-ptx", f"-arch={TARGET}", "-o", file]
    subprocess.run([*command, ROOT / "cuda/kernels.cu"], check=True, timeout=300)
    return file.read_text()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("jobs") / "kernel_jobs"
    parts = [ROOT / f"cpp/kvpool/cuda/{name}.cpp" for name in ("kernel_plan", "kernels", "reference")]
    sources = [*parts, ROOT / "tests/cpp/kernel_jobs/kernel_jobs.cpp"]
    unit = "".join(f'#include "{source}"\n' for source in sources)  # one, which takes half as long as four
    command = [compiler, "-std=c++20", "-O0", f"-I{ROOT}/cpp", "-o", program, "-x", "c++", "-"]
    subprocess.run(command, input=unit.encode(), check=True, timeout=600)
    seed = os.environ.get("KVPOOL_SEED", "7")
    made = subprocess.run([program, seed, str(JOBS)], check=True, capture_output=True, timeout=600).stdout
    return list(read_jobs(io.BytesIO(made), JOBS))


def kernel_for(kernels: dict[str, Kernel], launch: Launch, table: str) -> Kernel:
    work = UNITS[launch.width]
    (found,) = (kernel for name, kernel in kernels.items() if work in name and TABLES[table] in name)
    return found


def outcome(kernels: dict[str, Kernel], job: Job, table: str, blocks: int, ran: set[str]) -> bytes:
    """The result of a job when all of its launches find their table in this place."""
    memory = Memory()
    memory.add(job.source_at, job.source)
    memory.add(job.target_at, job.before, writable=True)
    for i, launch in enumerate(job.launches):
        kernel = kernel_for(kernels, launch, table)
        arguments = launch.header + launch.data
        if table == "in memory":
            at = TABLE_AT + (i << 20)
            memory.add(at, launch.data)
            arguments = launch.header + struct.pack("<Q", at)
        run(kernel, arguments, memory, blocks)
        ran.add(kernel.name)
    return memory.content(job.target_at)


def count_wrong(kernels: dict[str, Kernel], jobs: list[Job], ran: set[str] | None = None) -> int:
    """Jobs that end in a fault, or with other bytes than the reference. Each job is run with a table in every
    place where one can be."""
    wrong = 0
    for number, job in enumerate(jobs):
        assert all(len(launch.header) == HEADER_BYTES for launch in job.launches)
        for table in TABLES:
            try:
                right = outcome(kernels, job, table, 1 + number % 3, set() if ran is None else ran) == job.after
            except Fault as fault:
                print(f"job {number}, table {table}: {fault}")
                right = False
            wrong += not right
    return wrong


def test_every_kernel_agrees_with_its_reference(text, jobs):
    kernels = parse(text)
    assert len(kernels) == len(UNITS) * len(TABLES)
    ran: set[str] = set()
    assert count_wrong(kernels, jobs, ran) == 0
    assert ran == set(kernels)


def test_the_kernels_do_not_distinguish_targets():
    """Or each target that they tell apart would have to be run."""
    for file in [*(ROOT / "cuda").glob("*.cu*"), *(ROOT / "cpp/kvpool/cuda").glob("*.h")]:
        assert not re.search(r"__CUDA_ARCH__\s*[<>=!]", file.read_text()), file


def swap_words(text: str) -> str:
    return re.sub(r"(st\.global\.cs\.v4\.u32 \[%rd\d+\], \{)(%r\d+), (%r\d+)", r"\1\3, \2", text)


def flip_end_of_tiles(text: str) -> str:
    return text.replace("setp.ge.u32", "setp.gt.u32")


def drop_predicates(text: str) -> str:
    return re.sub(r"@!?%p\d+ bra ([^;]+);", "", text)


def write_beside(text: str) -> str:
    return re.sub(r"(st\.global\.cs\.u8 \[%rd\d+)\]", r"\1+1]", text)


def misalign(text: str) -> str:
    return re.sub(r"(st\.global\.cs\.u32 \[%rd\d+)\]", r"\1+2]", text)


def forget_the_stride(text: str) -> str:
    return text.replace("mul.lo.s64", "add.s64")


# Each change breaks all or some of the jobs with units of these widths.
CHANGES = {
    swap_words: {16}, flip_end_of_tiles: {16, 4, 1}, drop_predicates: {16, 4, 1}, write_beside: {16, 4, 1},
    misalign: {4}, forget_the_stride: {16, 4, 1},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_kernel_is_found(text, jobs, change):
    changed = change(text)
    assert changed != text
    kernels = parse(changed)
    for width in UNITS:
        some = [job for job in jobs if job.launches[0].width == width][:12]
        assert any(count_wrong(kernels, [job]) > 0 for job in some) == (width in CHANGES[change]), width


def test_an_unknown_instruction_is_an_error(text):
    for known, unknown in {
        "mul.hi.u32": "mul.hi.s32",
        "shr.u32": "shr.s32",
        "st.global.cs.u8": "st.shared.u8",
        "setp.lt.u32": "setp.ltu.f32",
        "ld.global.nc.u8": "ld.global.nc.s8",
    }.items():
        assert known in text
        with pytest.raises(PtxError, match=re.escape(unknown)):
            parse(text.replace(known, unknown))
