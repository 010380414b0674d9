# SPDX-License-Identifier: Apache-2.0
"""Which kernels the table of registers has, from what cuobjdump says of two and a stranger."""

import kernel_resources as resources

DECODE = (
    "_ZN9specfused4smxx18decode_attn_kernelINS0_10AttnTraitsI{}Li128ELi16EEEEEvNS_10AttnParamsE"
)
BF16, FP16 = DECODE.format("13__nv_bfloat16"), DECODE.format("6__half")
COMMIT = "_ZN9specfused4smxx12_GLOBAL__N__113commit_kernelENS_12CommitParamsEi"
USAGE = f"""
arch = sm_90a
 Function {BF16}:
  REG:210 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1
 Function {FP16}:
  REG:210 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1
 Function {COMMIT}:
  REG:64 STACK:8 SHARED:5976 LOCAL:0
 Function plan_kernel:
  REG:9 STACK:0 SHARED:0 LOCAL:0
"""
ELF = "".join(
    f".nv.info.{name}\n\tAttribute:\tEIATTR_PARAM\n\tValue:\t0x7\n"
    "\tAttribute:\tEIATTR_MAX_THREADS\n\tFormat:\tEIFMT_SVAL\n\tValue:\t0x80 0x1 0x1\n"
    for name in (BF16, FP16, COMMIT)
)


def select(rows, head_dim, sm_count, smem_per_sm, smem_per_block, wgmma):
    assert (rows, head_dim, sm_count, wgmma) == (16, 128, 132, False)
    return {"smem_bytes": 101888}


def test_table():
    usage = resources.resource_usage(USAGE)["sm_90a"]
    found = resources.kernels(usage, resources.most_threads(ELF), "sm_90a", select)
    assert resources.table(found).split("\n")[2:] == [
        "| decode | bf16, fp16 | 128 | 16 | 128 | 210 | 0 | 0 | 0 | 101888 | 2 |",
        "| commit | - | - | - | 128 | 64 | 8 | 0 | 4952 | 0 | 8 |",
    ]


def test_resident_ctas():
    """The least of registers, shared memory and threads."""
    assert resources.resident_ctas("sm_90a", 128, 212, 0) == 2
    assert resources.resident_ctas("sm_90a", 128, 32, 232448) == 1
    assert resources.resident_ctas("sm_90a", 128, 32, 232449) == 0
    assert resources.resident_ctas("sm_90a", 512, 32, 0) == 4
    assert resources.resident_ctas("sm_89", 512, 32, 0) == 3
    assert resources.resident_ctas("sm_90a", 32, 8, 0) == 32
    assert resources.resident_ctas("sm_90a", 384, 168, 206848) == 1
