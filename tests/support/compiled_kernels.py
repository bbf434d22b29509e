"""Compile every Triton kernel without a GPU: python tests/support/compiled_kernels.py [--arch 90]

Prints, by kernel and architecture, registers of a thread, spilled words (local loads and stores in the machine code)
and bytes of shared memory of a program. Shapes are Qwen3-8B's: 32 heads on 8 of 128, 152 k tokens, gamma 7.
"""

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.kernels.attention import MOST_CUDA_HEAD
from outrider.kernels.cuda import (
    acceptance,
    admission,
    attention,
    draft_block,
    drafts,
    experts,
    lookup,
    noise,
    ragged,
    rotated,
    rules,
)

ARCHITECTURES = (80, 90, 100)
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel with its argument types, in order, and its constants.

    types: i: *i64, j: *i32, f: *fp32, d: *fp64, h: *bf16, b: *i1; n: i32, x: fp32. Pointers and capitals (N) are
    multiples of 16.
    """

    name: str
    kernel: Any
    types: str
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


TYPES = {"i": "*i64", "j": "*i32", "f": "*fp32", "d": "*fp64", "h": "*bf16", "b": "*i1", "n": "i32", "x": "fp32"}
ROW = {"CHUNK": noise.CHUNK, "BLOCK": noise.BLOCK}
GIVEN = {"HAS_REQUEST": True, "HAS_TOTAL": True}
SPANS = {"HAS_TOPS": True, "SPAN": rules.SPAN}
DRAFTED = {"HAS_VOCAB": False, "HAS_POINTS": True, "WIDTH": 8}
BLOCKS = DRAFTED | {"BY_BLOCK": True}
EXACT = {"num_warps": 8} | noise.BITS
LAST = {"num_warps": 1} | noise.BITS
HEADS = (64, 96, 128, 256, MOST_CUDA_HEAD)
"""Numbers of a head."""


def attention_case(kind: str, dim: int, rows: int, split: bool) -> Case:
    exact = kind == "f"
    block_m, block_n = attention.tile_for(rows, dim, exact)
    shape = {"HEADS": 32, "GROUP": 4, "DIM": dim, "WIDE": attention.wide(dim), "CAUSAL": True}
    shape |= {"BLOCK_M": block_m, "BLOCK_N": block_n}
    return Case(
        f"attention {'float32' if exact else 'bfloat16'} {dim}, {block_m} rows{', split' if split else ''}",
        attention.attention_kernel,
        f"{kind * 3}jjij{kind}{'ff' if split else kind * 2}xxnn" + "N" * 8 + "n",
        shape | {"SPLIT": split, "LEAST": attention.LEAST},
        {"num_warps": attention.warps_for(block_m, dim), "num_stages": 2 if exact else 3},
    )


def merge_case(dim: int) -> Case:
    block_m, block_n = attention.tile_for(64, dim, exact=False)
    shape = {"HEADS": 32, "GROUP": 4, "DIM": dim, "WIDE": attention.wide(dim), "CAUSAL": True}
    shape |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "LEAST": attention.LEAST, "SPLITS": attention.MOST_SPLITS}
    return Case(f"attention, merge {dim}", attention.merge_kernel, "jjhffnnNnn", shape)


CASES = [
    Case(
        "flatten", ragged.flatten_kernel, "iiiijiiiiiiinnnnnn",
        {"REQUESTS": 256, "WIDTH": 8, "PADDING": ragged.PADDING_BLOCK}, {"num_warps": 1},
    ),
    Case("commit", ragged.commit_kernel, "iiiiiiiiinnn", {"BLOCK": ragged.COMMIT_BLOCK}),
    Case("cached slots", ragged.cached_slots_kernel, "jjijjnn", {"LANES": ragged.LANES, "BLOCK": ragged.LIST_BLOCK}),
    Case(
        "survival and top-K, 256 x 7", admission.admit_kernel, "fiifbifnnnnnnnn",
        {"REQUESTS": 256, "WIDTH": 8},
    ),
    Case("streams", noise.streams_kernel, "iiinn", {"BLOCK": noise.SMALL}),
    Case("keys of drafts", noise.draft_keys_kernel, "ibiinnnn", {"BLOCK": noise.SMALL}),
    Case("uniforms", noise.numbers_kernel, "idnn", {"UNIFORM": True, "BLOCK": noise.SMALL}, noise.BITS),
    Case("logits of a chunk", rules.chunk_kernel, "fiifffjfnNn", GIVEN | ROW | SPANS),
    Case(
        "rules of a row", rules.rules_kernel, "fiififfffjfjffjjjnNn",
        GIVEN | {"HAS_K": True, "HAS_P": True, "HAS_MIN": True}
        | {"CHUNKS": 32, "PIVOTS": rules.PIVOTS, "SPAN": rules.SPAN, "SPANS": 2048} | ROW,
        {"num_warps": rules.WARPS},
    ),
    Case("acceptance, scales", acceptance.scales_kernel, "fiifbbffjjidfifnNNN", {"HAS_Q": True} | BLOCKS, LAST),
    Case("acceptance, left over", acceptance.mass_kernel, "fiiifbbffjjifjfdnnnNNNn", DRAFTED | ROW, EXACT),
    Case(
        "acceptance, last token", acceptance.final_kernel, "fiiifbbffjjidiifjfddjnnnNNNn",
        {"HAS_ROW_KEYS": True, "HAS_Q": True, "CHUNKS": 32} | BLOCKS | ROW, EXACT,
    ),
    Case(
        "acceptance, outcome", acceptance.outcome_kernel, "iifbjidfddjiinn",
        {"BY_BLOCK": True, "WIDTH": 8, "CHUNKS": 32}, LAST,
    ),
    *(attention_case("h", dim, rows, True) for dim in HEADS for rows in (16, 64)),
    attention_case("h", 128, 64, False),
    *(attention_case("f", dim, 16, False) for dim in HEADS),
    *(merge_case(dim) for dim in HEADS),
    Case(
        "draft block, bias", draft_block.bias_kernel, "hhhfnnNNNNN",
        {"ROWS": 32, "COLUMNS": draft_block.COLUMNS, "DEPTH": draft_block.DEPTH, "HAS_BIAS": True}, {"num_stages": 3},
    ),
    Case(
        "draft block, draw and q", draft_block.sample_kernel, "ffbiiffjjdjnNn",
        {"NAMED": False, "WRITE": True, "HAS_UNREAD": True} | ROW, EXACT,
    ),
    Case(
        "prompt lookup", lookup.lookup_kernel, "jjiiiffffiifnnnn", {"WIDTH": 8, "POSITIONS": lookup.POSITIONS},
        {"num_warps": 8},
    ),
    Case("weighed drafts", drafts.weigh_kernel, "ifiiifffinnnnnn", {"WIDTH": 8, "CALIBRATED": True}, LAST),
    Case("lookup or model", drafts.choose_kernel, "iifiifiifbnnnnnnxx", {"WIDTH": 8}, LAST),
    Case(
        "experts", experts.products_kernel, "hhiihnNnN",
        {"ROWS": experts.ROWS, "COLUMNS": experts.COLUMNS, "DEPTH": experts.DEPTH}, {"num_stages": 3},
    ),
    Case(
        "draft layer, rotated", rotated.rotate_kernel, "hhiihhhhhNnx",
        {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "WIDE": 128, "NORMED": True}, {"num_warps": 1},
    ),
    Case(
        "draft context, rotated", rotated.rotate_kernel, "hhiihhhhhNnx",
        {"HEADS": 0, "KV_HEADS": 8, "DIM": 128, "WIDE": 128, "NORMED": True}, {"num_warps": 1},
    ),
    Case("draft block, token", draft_block.chosen_kernel, "fifjdjifn", {"NAMED": False, "CHUNKS": 32}, LAST),
]  # fmt: skip


def compiled(case: Case, architecture: int) -> Any:
    signature: dict[str, str] = {}
    names = [name for name in case.kernel.arg_names if name not in case.constants]
    if len(names) != len(case.types):
        raise ValueError(f"{case.name}: {len(names)} arguments ({', '.join(names)}), {len(case.types)} types")
    aligned = {}
    kinds = iter(case.types)
    for place, name in enumerate(case.kernel.arg_names):
        kind = "constexpr" if name in case.constants else next(kinds)
        signature[name] = TYPES.get(kind.lower(), kind)
        if signature[name].startswith("*") or kind == "N":
            aligned[(place,)] = ALIGNED
    source = ASTSource(case.kernel, signature, case.constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=case.options)


def resources(kernel: Any) -> tuple[int, int, int]:
    """Registers of a thread, local loads and stores, and bytes of shared memory of a program."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("--dump-resource-usage", "--dump-sass")
        )
    registers, spills = re.search(r"REG:(\d+)", usage), re.findall(r"\b(?:LDL|STL)\b", code)
    if registers is None:
        raise RuntimeError(f"{tool} names no registers")
    return int(registers[1]), len(spills), kernel.metadata.shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, help="one compute capability; default: all of them")
    chosen = parser.parse_args().arch
    architectures = ARCHITECTURES if chosen is None else (chosen,)
    print(f"| Triton {triton.__version__}: registers / spills / shared |", *(f"sm_{a} |" for a in architectures))
    print("|---" * (len(architectures) + 1) + "|")
    for case in CASES:
        cells = [" / ".join(map(str, resources(compiled(case, each)))) for each in architectures]
        print(f"| {case.name} |", *(f"{cell} |" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
