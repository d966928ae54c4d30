"""Descriptors that the compiler of the last step makes wrong are found, and right ones are not."""

from __future__ import annotations

from wgmma_descriptors import differences

PTX = """
	mov.b32 	%r1, global_smem;
	add.s32 	%r2, %r1, 65536;
	bfe.u32 	%r3, %r2, 4, 14;
	cvt.u64.u32 	%rd1, %r3;
	or.b64 	%rd2, %rd1, -9223371899415822336;
	add.s64 	%rd3, %rd1, -9223371899415822334;
	wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r10,%r11}, {%r4,%r5}, %rd2, %p1, 1, 1, 0;
	wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r10,%r11}, {%r6,%r7}, %rd3, %p1, 1, 1, 0;
"""
SASS = """
--:-:-:-:1	ULDC UR4, c[0x0][0xaac];
--:-:-:-:1	UMOV UR7, 0x400;
--:-:-:-:1	UIADD3 UR14, UR7, 0x10000, URZ;
--:-:-:-:1	USHF.R.U32.HI UR14, URZ, 0x4, UR14;
--:-:-:-:1	USGXT.U32 UR14, UR14, 0xe;
--:-:-:-:1	UMOV UR15, 0x80000020;
--:-:-:-:1	HGMMA.64x32x16.F32.BF16 R24, R72, gdesc[UR12], R24;
--:-:-:-:1	UIADD3 UR26, UP0, UR14, 0x2, URZ;
--:-:-:-:1	UIADD3.X UR27, URZ, -0x7fffffe0, URZ, UP0, !UPT;
--:-:-:-:1	HGMMA.64x32x16.F32.BF16 R24, R76, gdesc[UR24], R24, gsb0;
"""
LOOP = PTX.replace("	add.s32", "$L__BB0_1:\n	add.s32", 1).replace(
    "	wgmma", "	@%p2 bra 	$L__BB0_1;\n	wgmma", 1
)


def test_descriptors() -> None:
    """The second step read at 16 times a kernel argument; a wrong number is found as well as a wrong register."""
    assert differences(PTX, SASS) == []
    lost = SASS.replace("UR26, UP0, UR14,", "UR26, UP0, UR4,")
    assert differences(PTX, lost) == ["product 1: 0x8000002000001042 has become an argument"]
    moved = SASS.replace("0x2, URZ", "0x4, URZ")
    assert differences(PTX, moved) == ["product 1: 0x8000002000001042 has become 0x8000002000001044"]
    assert differences(PTX, SASS.replace("gsb0", "", 1).rsplit("--:-:-:-:1	HGMMA", 1)[0]) != []


def test_what_is_unknown_is_let_be() -> None:
    """Registers from elsewhere, predicated instructions and loops."""
    assert differences(PTX, SASS.replace("UIADD3 UR26, UP0, UR14, 0x2, URZ", "R2UR UR26, R3")) == []
    assert (
        differences(PTX, SASS.replace("	UIADD3 UR26, UP0, UR14, 0x2", "	@UP1 UIADD3 UR26, UP0, UR4, 0x4")) == []
    )
    assert differences(LOOP, SASS.replace("UP0, UR14", "UP0, UR4")) == []
