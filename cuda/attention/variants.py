"""The variants of the kernels that are compiled, and the arguments of each: data alone, without Triton."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["DTYPES", "TARGETS", "TRITON", "VARIANTS", "Variant", "variant_of"]

TRITON: Final = "3.9.0"  # another version makes other machine code, with other bits
TARGETS: Final = (80, 90, 100)

# Of K, V and the queries: the name in KVLayout, Triton's, and bytes.
DTYPES: Final = {"float32": ("fp32", 4), "float16": ("fp16", 2), "bfloat16": ("bf16", 2)}
HEAD_DIMS: Final = (64, 128)
# Query rows of a KV head that a program computes: the least that tensor cores take. One number for all calls, so that a
# row has the same bits whatever the number of query tokens and of heads.
LEAF_ROWS: Final = 16
MERGE_ROWS: Final = 8


class Variant(NamedTuple):
    """One kernel, as Triton compiles it. Integers that are `aligned` are multiples of 16, and so are addresses."""

    kernel: str
    dtype: str  # of K, V and the queries, as in KVLayout; "" for a merge
    head_dim: int
    rows: int
    arguments: dict[str, str]  # name: type; in the kernel's order, without constants
    aligned: tuple[str, ...]
    constants: dict[str, int | bool]
    num_warps: int
    num_stages: int
    contract: bool  # a product and a sum into one rounding

    @property
    def name(self) -> str:
        """Unique, and a word of C++."""
        parts = [self.kernel, self.dtype, f"d{self.head_dim}", f"r{self.rows}"]
        return "_".join(part for part in parts if part)


def leaves(dtype: str, head_dim: int) -> Variant:
    """attend_leaves for this type."""
    triton_type, size = DTYPES[dtype]
    pointers = {"q": f"*{triton_type}", "k": f"*{triton_type}", "v": f"*{triton_type}", "k_blocks": "*i64"}
    pointers |= {"v_blocks": "*i64", "tasks": "*i64", "out": "*fp32"}
    numbers = {"head_stride": "i64", "token_stride": "i64", "block_tokens": "i32", "group": "i32", "query_heads": "i32"}
    # float32 is multiplied without tensor cores, in registers.
    tile = 32 if dtype == "float32" else 64
    constants: dict[str, int | bool] = {"D": head_dim, "ROWS": LEAF_ROWS, "TILE": tile, "UNIT": 16 // size}
    return Variant(
        kernel="attend_leaves",
        dtype=dtype,
        head_dim=head_dim,
        rows=LEAF_ROWS,
        arguments=pointers | numbers | {"scale_log2e": "fp32"},
        aligned=(*pointers, "head_stride", "token_stride"),
        constants=constants | {"FLOAT_DOT": False},
        num_warps=8 if dtype == "float32" else 4,
        num_stages=2 if dtype == "float32" else 3,
        contract=True,
    )


def merge(head_dim: int) -> Variant:
    """merge_pairs for this dimension."""
    return Variant(
        kernel="merge_pairs",
        dtype="",
        head_dim=head_dim,
        rows=MERGE_ROWS,
        arguments={"values": "*fp32", "pairs": "*i64"},
        aligned=("values",),  # pairs of a level begin anywhere
        constants={"D": head_dim, "ROWS": MERGE_ROWS},
        num_warps=4,
        num_stages=1,
        contract=False,
    )


VARIANTS: Final[tuple[Variant, ...]] = (
    *(leaves(dtype, head_dim) for dtype in DTYPES for head_dim in HEAD_DIMS),
    *(merge(head_dim) for head_dim in HEAD_DIMS),
)


def variant_of(kernel: str, dtype: str, head_dim: int) -> Variant:
    """The one for these; KeyError without one."""
    for variant in VARIANTS:
        if (variant.kernel, variant.dtype, variant.head_dim) == (kernel, dtype, head_dim):
            return variant
    raise KeyError((kernel, dtype, head_dim))
