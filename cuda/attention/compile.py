"""Compiles the kernels of attention to machine code (cubins), ahead of time and without a GPU.

    python compile.py --out FOLDER [--targets 80,90,100] [--only WORD]

Needs Triton of the version that variants.py names, and nothing else; a build calls it where KVPOOL_TRITON_PYTHON names
a Python that has it (cmake/triton.cmake). Writes to FOLDER one cubin for each variant and target, and cubins.cpp, which
has them as cpp/kvpool/attend_gpu/cubin.h wants them. Refuses what the launcher does not know how to launch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import variants as known
from variants import Variant

__all__ = ["Compiled", "compiled", "cubins_cpp", "main", "refusal", "source_hash"]

HERE: Final = Path(__file__).resolve().parent
# Of Triton's types in PTX.
PTX_TYPES: Final = {"i64": ".u64", "i32": ".u32", "fp32": ".f32"}
# Behind the arguments Triton passes two pointers to memory that these kernels do not use.
HIDDEN: Final = [".u64", ".u64"]
DTYPE_OF_CPP: Final = {"": "kNone", "float32": "kFloat32", "float16": "kFloat16", "bfloat16": "kBfloat16"}


class Compiled(NamedTuple):
    """Machine code of one variant for one target."""

    variant: Variant
    target: int
    cubin: bytes
    shared: int  # bytes that a launch has to ask for
    threads: int

    @property
    def name(self) -> str:
        """Of the file, and a word of C++."""
        return f"{self.variant.name}_sm{self.target}"


def source_hash() -> str:
    """Changes when the kernels or their variants do."""
    digest = hashlib.sha256(known.TRITON.encode())
    for name in ("kernels.py", "variants.py"):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def refusal(variant: Variant, ptx: str, metadata: Any) -> str | None:
    """Why the launcher could not launch this, or would get other bits than it promises."""
    entry = re.search(rf"\.entry {variant.kernel}\((.*?)\)", ptx, re.DOTALL)
    found = re.findall(r"\.param (\.\w+)", entry[1]) if entry else []
    wanted = [".u64" if kind.startswith("*") else PTX_TYPES[kind] for kind in variant.arguments.values()] + HIDDEN
    if found != wanted:
        return f"its parameters are {found}, not {wanted}"
    for name in ("global_scratch_size", "profile_scratch_size", "tmem_size"):
        if getattr(metadata, name):
            return f"it wants {name} {getattr(metadata, name)}"
    if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.launch_pdl:
        return "it wants a cluster, a cooperative launch or a dependent one"
    if not variant.contract and "fma." in ptx:
        return "a product and a sum are contracted"
    return None


def compiled(variant: Variant, target: int) -> Compiled:
    """Takes a second or two. Raises SystemExit if the launcher could not launch it."""
    import kernels
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(kernels, variant.kernel)
    names = list(function.arg_names)
    if [name for name in names if name not in variant.constants] != list(variant.arguments):
        raise SystemExit(f"{variant.name}: variants.py does not have the arguments of the kernel in their order")
    source = ASTSource(
        fn=function,
        signature={name: variant.arguments.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": variant.contract}
    kernel = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    if why := refusal(variant, kernel.asm["ptx"], kernel.metadata):
        raise SystemExit(f"{variant.name} for sm_{target}: {why}")
    return Compiled(variant, target, kernel.asm["cubin"], kernel.metadata.shared, 32 * variant.num_warps)


def cubins_cpp(all_of_them: list[Compiled]) -> str:
    """The table of what was compiled, as C++. It reads the cubins when it is assembled."""
    lines = [
        "// Written by cuda/attention/compile.py.",
        '#include "kvpool/attend_gpu/cubin.h"',
        "",
        "namespace {",
        "",
    ]
    rows = []
    for one in all_of_them:
        symbol = f"kvpool_cubin_{one.name}"
        lines += [
            f'asm(".pushsection .rodata\\n.balign 16\\n{symbol}:\\n.incbin \\"{one.name}.cubin\\"\\n.popsection\\n");',
            f'extern "C" const unsigned char {symbol}[] __attribute__((visibility("hidden")));',
        ]
        variant = one.variant
        rows.append(
            f'    {{"{one.name}", "{variant.kernel}", {symbol}, {len(one.cubin)}, {one.target}, '
            f"DType::{DTYPE_OF_CPP[variant.dtype]}, {variant.head_dim}, {variant.rows}, "
            f"{variant.constants.get('TILE', 0)}, {one.threads}, {one.shared}}},"
        )
    lines += [
        "",
        "}  // namespace",
        "",
        "namespace kvpool {",
        "",
        "std::span<const AttentionCubin> attention_cubins() noexcept {",
        "  static constexpr AttentionCubin kCubins[] = {",
        *(f"  {row}" for row in rows),
        "  };",
        "  return kCubins;",
        "}",
        "",
        f'const char* attention_cubins_source() noexcept {{ return "Triton {known.TRITON}, source {source_hash()}"; }}',
        "",
        "}  // namespace kvpool",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Writes the cubins, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", default=",".join(str(target) for target in known.TARGETS))
    parser.add_argument("--only", default="", help="only variants whose names contain this")
    options = parser.parse_args()
    targets = [int(target) for target in options.targets.split(",")]
    options.out.mkdir(parents=True, exist_ok=True)
    # No lines of Python in the machine code, so that the folder of the checkout changes no byte.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    os.environ["TRITON_CACHE_DIR"] = str((options.out / "cache").resolve())
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    if triton.__version__ != known.TRITON:
        sys.exit(f"the kernels of attention are for Triton {known.TRITON}; this is {triton.__version__}")
    chosen = [variant for variant in known.VARIANTS if options.only in variant.name]
    table = [compiled(variant, target) for variant in chosen for target in targets]
    for one in table:
        (options.out / f"{one.name}.cubin").write_bytes(one.cubin)
    (options.out / "cubins.cpp").write_text(cubins_cpp(table))


if __name__ == "__main__":
    main()
