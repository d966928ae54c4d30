"""Descriptors that the compiler of the last step makes wrong are found, and right ones are not."""

from __future__ import annotations

from wgmma_descriptors import compare

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
# The same, a thousand times, then a jump back to the products.
LOOP = SASS.replace(
    "--:-:-:-:1	HGMMA.64x32x16.F32.BF16 R24, R72", "LBB1:\n--:-:-:-:1	HGMMA.64x32x16.F32.BF16 R24, R72"
)
LOOP += """--:-:-:-:1	UISETP.NE.AND UP0, UPT, UR4, 0x3e8, UPT;
--:-:-:-:1	@P0 BRA LBB1;
--:-:-:-:1	EXIT;
LBB2:
--:-:-:-:1	BRA LBB2;
"""


def test_descriptors() -> None:
    """The second step read at 16 times a kernel argument; a wrong number is found as well as a wrong register."""
    assert compare(PTX, SASS) == (2, [])
    lost = SASS.replace("UR26, UP0, UR14,", "UR26, UP0, UR4,")
    assert compare(PTX, lost) == (2, ["product 1: 0x8000002000001042 has become an argument"])
    moved = SASS.replace("0x2, URZ", "0x4, URZ")
    assert compare(PTX, moved) == (2, ["product 1: 0x8000002000001042 has become 0x8000002000001044"])
    fewer = SASS.replace("gsb0", "", 1).rsplit("--:-:-:-:1	HGMMA", 1)[0]
    assert compare(PTX, fewer) == (0, ["2 products in PTX, 1 in SASS"])
    assert compare("	ret;", "--:-:-:-:1	EXIT;") == (0, [])


def test_loops_are_followed() -> None:
    """What a round leaves for the next one counts, and so does a branch that only some rounds take."""
    assert compare(PTX, LOOP) == (2, [])
    overwritten = LOOP.replace("	UISETP", "	UMOV UR14, 0x40;\n--:-:-:-:1	UISETP")
    wrong = ["product 0: 0x8000002000001040 has become", "product 1: 0x8000002000001042 has become"]
    assert compare(PTX, overwritten) == (2, [f"{text} one thing or another" for text in wrong])
    restored = overwritten.replace("	UMOV UR14, 0x40;", "	UMOV UR14, 0x40;\n--:-:-:-:1	UMOV UR14, 0x1040;")
    assert compare(PTX, restored) == (2, [])
    after = LOOP.replace("	EXIT;", "	UMOV UR14, 0x40;\n--:-:-:-:1	EXIT;")
    assert compare(PTX, after) == (2, [])
    branch = "@P0 BRA LBB1;\n--:-:-:-:1	UMOV UR14, 0x40;\nLBB1:\n--:-:-:-:1	UIADD3 UR26,"
    skipped = SASS.replace("UIADD3 UR26,", branch)
    assert compare(PTX, skipped) == (2, [f"{wrong[1]} one thing or another"])
    together = skipped.replace("@P0 BRA LBB1", "BRA.DIV ~URZ, 0x95b0")
    assert compare(PTX, together)[1] == ["product 1: 0x8000002000001042 has become 0x8000002000000042"]
    never = skipped.replace("@P0 BRA LBB1", "BRA LBB1")
    assert compare(PTX, never) == (2, [])


def test_what_is_unknown_is_not_right() -> None:
    """Registers from elsewhere, predicated instructions, a carry that something else has overwritten."""
    elsewhere = SASS.replace("UIADD3 UR26, UP0, UR14, 0x2, URZ", "R2UR UR26, R3")
    perhaps = SASS.replace("	UIADD3 UR26, UP0, UR14, 0x2", "	@UP1 UIADD3 UR26, UP0, UR4, 0x4")
    overwritten = SASS.replace("	UIADD3.X", "	VOTEU.ALL UP0, P1;\n--:-:-:-:1	UIADD3.X")
    wide = SASS.replace("	UIADD3.X", "	UIMAD.WIDE.U32 UR26, UR9, UR5, URZ;\n--:-:-:-:1	UIADD3.X")
    for text in (elsewhere, perhaps, overwritten, wide):
        assert compare(PTX, text) == (2, ["product 1: 0x8000002000001042 has become something unknown"])


def test_slots_of_rings() -> None:
    """Where the slot is only known on the machine, what is added to its address counts, and that it is an address."""
    loads = ("mov.u32 	%r1, 0;\n	@%p1 ld.global.b32 { %r1 }, [%rd9];", "ld.shared.v2.b32 {%r1, %r5}, [%r6];")
    for load in loads:
        ring = PTX.replace("mov.b32 	%r1, global_smem;", load)
        somewhere = SASS.replace("UMOV UR7, 0x400", "R2UR UR7, R3")
        for text in (
            SASS,
            somewhere,
            somewhere.replace("USGXT.U32 UR14, UR14, 0xe", "ULOP3.LUT UR14, UR14, 0x3fff, URZ, 0xc0, !UPT"),
        ):
            assert compare(ring, text) == (2, [])
        wrong = "product 1: a slot + 0x8000002000000002 has become "
        assert compare(ring, somewhere.replace("0x2, URZ", "0x4, URZ")) == (2, [f"{wrong}a slot + 0x8000002000000004"])
        assert compare(ring, somewhere.replace("UR26, UP0, UR14,", "UR26, UP0, UR4,")) == (2, [f"{wrong}an argument"])
        lost = somewhere.replace("UR26, UP0, UR14,", "UR26, UP0, UR26,")
        assert compare(ring, lost) == (2, [f"{wrong}something unknown"])
        cut = somewhere.replace("USGXT.U32 UR14, UR14, 0xe", "USGXT.U32 UR14, UR14, 0xf")
        assert len(compare(ring, cut)[1]) == 2
    moved = PTX.replace("add.s32 	%r2, %r1, 65536", "ld.global.b32 %r2, [%rd9]").replace(
        "bfe.u32 	%r3, %r2, 4, 14", "and.b32 	%r3, %r2, 16383"
    )
    first = SASS.replace(
        "	UMOV UR15", "	@P0 BRA LBB1;\n--:-:-:-:1	UMOV UR14, 0x40;\nLBB1:\n--:-:-:-:1	UMOV UR15"
    )
    assert compare(moved, first.replace("UMOV UR7, 0x400", "R2UR UR7, R3")) == (2, [])


def test_what_ptx_does_not_know_is_let_be() -> None:
    """No number, and no address of 14 bits."""
    unknown = PTX.replace("bfe.u32 	%r3, %r2, 4, 14;", "ld.global.b32 %r3, [%rd9];")
    assert compare(unknown, SASS.replace("USGXT.U32 UR14, UR14, 0xe", "R2UR UR14, R3")) == (0, [])


def test_copies_in_other_registers_are_followed() -> None:
    """Uniform registers that did not suffice wait in those of lanes, unless something overwrites them there."""
    moves = ("IMAD.U32 R9, RZ, RZ, UR14;", "UMOV UR14, 0x7;", "MOV R4, R9;", "%sR2UR UR14, R4;")
    away = "\n--:-:-:-:1	".join((*moves, "UMOV UR15,"))
    text = SASS.replace("UMOV UR15,", away)
    assert compare(PTX, text % "") == (2, [])
    for between in ("LDS.128 R2, [R8];", "IMAD.WIDE R4, R2, R3, RZ;", "@P0 MOV R4, 0x7;", "HGMMA.64x8x16.F32 R4, R2;"):
        assert len(compare(PTX, text % f"{between}\n--:-:-:-:1	")[1]) == 2
    assert compare(PTX, text % "ISETP.GE.AND P0, PT, R4, R2, PT;\n--:-:-:-:1	") == (2, [])


def test_parts_in_another_order() -> None:
    """ptxas may move blocks: each product of PTX needs one of its own."""
    first, second = (
        "HGMMA.64x32x16.F32.BF16 R24, R72, gdesc[UR12], R24;",
        "HGMMA.64x32x16.F32.BF16 R24, R76, gdesc[UR24]",
    )
    behind = SASS.replace(f"	{first}\n", "	NOP;\n") + f"--:-:-:-:1	{first}\n"
    assert compare(PTX, behind) == (2, [])
    twice = behind.replace(second, second.replace("UR24", "UR12"))
    assert compare(PTX, twice)[1] == ["product 1: 0x8000002000001042 has become 0x8000002000001040"]
