"""The kernels of attention compiled ahead of time: what a build gets, and what it refuses. No GPU, but Triton."""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda.triton_kit import FOLDER, module, need_triton, variants
from kit import LONG

need_triton()

ROOT = FOLDER.parents[1]
ELF_FOR_CUDA = 190


def compile_to(folder: Path, *arguments: str) -> dict[str, bytes]:
    """In another process: the tests of this one interpret."""
    command = [sys.executable, FOLDER / "compile.py", "--out", folder, *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    return {file.stem: file.read_bytes() for file in folder.glob("*.cubin")}


def machine_code(folder: Path, name: str) -> str:
    found = importlib.util.find_spec("triton")  # not imported: another test of this process interprets with it
    assert found is not None
    assert found.origin is not None
    tool = Path(found.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return subprocess.run([tool, folder / f"{name}.cubin"], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Of each kernel one variant for one target; all of them in the long form."""
    folder = tmp_path_factory.mktemp("compiled") / "out"
    if LONG:
        return folder, compile_to(folder)
    arguments = ["--targets", "80", "--only"]
    return folder, compile_to(folder, *arguments, "bfloat16_d64") | compile_to(folder, *arguments, "merge_pairs_d64")


def test_cubins_are_for_the_gpu_that_their_name_says(compiled):
    _, cubins = compiled
    assert len(cubins) == (len(variants.VARIANTS) * len(variants.TARGETS) if LONG else 2)
    for name, cubin in cubins.items():
        assert cubin[:4] == b"\x7fELF"
        assert struct.unpack_from("<H", cubin, 18)[0] == ELF_FOR_CUDA
        assert re.fullmatch(r"(attend_leaves|merge_pairs)_\w+_sm(80|90|100)", name)
        assert name.split("_d")[0].split("_")[0].encode() in cubin


def test_leaves_load_16_bytes_at_once_and_multiply_with_tensor_cores(compiled):
    """Without the promise that addresses are aligned they would do neither."""
    folder, _ = compiled
    code = machine_code(folder, "attend_leaves_bfloat16_d64_r16_sm80")
    assert "LDGSTS.E.BYPASS.128" in code or "LDG.E.128" in code
    assert "HMMA.16816.F32.BF16" in code


def test_a_merge_rounds_each_product(compiled):
    """So that its bits are those of the CPU."""
    folder, cubins = compiled
    for name in cubins:
        if name.startswith("merge_pairs"):
            code = machine_code(folder, name)
            assert "FMUL" in code
            assert "FFMA" not in code


def test_the_same_source_gives_the_same_bytes_wherever_it_is_compiled(compiled, tmp_path):
    _, cubins = compiled
    again = compile_to(tmp_path / "elsewhere", "--targets", "80", "--only", "merge_pairs_d64")
    assert again == {"merge_pairs_d64_r8_sm80": cubins["merge_pairs_d64_r8_sm80"]}
    assert str(ROOT).encode() not in b"".join(cubins.values())


@pytest.fixture(scope="module")
def compiler():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "variants", variants)  # a script finds it beside itself
        return module("compile")


def ptx_of(variant, *kinds):
    given = ",\n".join(f"\t.param {kind} {variant.kernel}_param_{i}" for i, kind in enumerate(kinds))
    return f".visible .entry {variant.kernel}(\n{given}\n)\n{{ ret; }}\n"


def metadata(**changes):
    usual = {"global_scratch_size": 0, "profile_scratch_size": 0, "tmem_size": 0, "num_ctas": 1}
    return SimpleNamespace(**(usual | {"launch_cooperative_grid": False, "launch_pdl": False} | changes))


def test_what_the_launcher_cannot_launch_is_refused(compiler):
    merge = variants.variant_of("merge_pairs", "", 64)
    right = ptx_of(merge, ".u64", ".u64", ".u64", ".u64")
    assert compiler.refusal(merge, right, metadata()) is None
    for wrong in (ptx_of(merge, ".u64", ".u64"), ptx_of(merge, ".u64", ".u32", ".u64", ".u64"), "no kernel"):
        assert "parameters" in compiler.refusal(merge, wrong, metadata())
    for change in ({"global_scratch_size": 16}, {"profile_scratch_size": 8}, {"tmem_size": 64}, {"num_ctas": 2},
                   {"launch_cooperative_grid": True}, {"launch_pdl": True}):  # fmt: skip
        assert compiler.refusal(merge, right, metadata(**change))
    assert "contracted" in compiler.refusal(merge, right + "fma.rn.f32 %f1, %f2, %f3, %f4;", metadata())


# Of the members of the structures in C++, which the launcher passes in this order.
CPP_TYPES = {"CuPointer": ("*", "i64"), "std::int64_t": ("i64",), "std::int32_t": ("i32",), "float": ("fp32",)}


@pytest.mark.parametrize(
    ("kernel", "structure"), [("attend_leaves", "LeafArguments"), ("merge_pairs", "MergeArguments")]
)
def test_the_launcher_passes_the_arguments_of_the_kernel(kernel, structure):
    header = (ROOT / "cpp" / "kvpool" / "attend_gpu" / "leaf_plan.h").read_text()
    body = re.search(rf"struct {structure} {{(.*?)\n}};", header, re.DOTALL)
    assert body
    members = re.findall(r"^  ([\w:]+) (\w+) = ", body[1], re.MULTILINE)
    for variant in variants.VARIANTS:
        if variant.kernel == kernel:
            assert [name for _, name in members] == list(variant.arguments)
            for (kind, _), declared in zip(members, variant.arguments.values(), strict=True):
                assert declared.startswith(CPP_TYPES[kind]), declared


@pytest.mark.parametrize(("name", "structure"), [("TASK_COLUMNS", "LeafTask"), ("PAIR_COLUMNS", "MergePair")])
def test_tables_have_the_columns_of_the_kernel(name, structure):
    header = (ROOT / "cpp" / "kvpool" / "attend_gpu" / "leaf_plan.h").read_text()
    body = re.search(rf"struct {structure} {{(.*?)\n}};", header, re.DOTALL)
    columns = re.search(rf"{name} = tl.constexpr\((\d+)\)", (FOLDER / "kernels.py").read_text())
    assert body
    assert columns
    assert len(re.findall(r"^  std::int64_t \w+ = ", body[1], re.MULTILINE)) == int(columns[1])
