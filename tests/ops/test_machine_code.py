"""What a program reads though nothing has written it is found, along all ways, and only that."""

from __future__ import annotations

from machine_code import blocks_of, inlined, overwritten, uniform, unwritten

# As ptxas 12.8 made it: the copy of UR56 that UR22 should have been is lost.
LOST = """
	S2UR UR4, SR_CgaCtaId;
	UMOV UR56, 0x240;
	UIADD3 UR22, UP0, UR22, 0x2, URZ;
	UIADD3.X UR23, UR23, -0x7fffffe0, URZ, UP0, !UPT;
	HGMMA.64x32x16.F32.BF16 R56, R28, gdesc[UR20], R56, gsb0;
	EXIT;
"""
BRANCH = """
	@P0 BRA `(.L_x_1);
	UMOV UR6, 0x1;
	BRA `(.L_x_2);
.L_x_1:
	UMOV UR6, 0x2;
.L_x_2:
	MOV R0, UR6;
	EXIT;
"""
ROUTINE = """
main:
	UMOV UR6, 0x1;
	CALL.REL.NOINC `(half);
	MOV R0, UR6;
	UMOV UR8, 0x1;
	@P1 CALL.REL.NOINC `(half);
	MOV R0, UR8;
	EXIT;
half:
	@P0 BRA `(.L_x_1);
	UMOV UR9, 0x2;
.L_x_1:
	RET.REL.NODEC R2 `(main);
"""


def test_lost_copies_are_found() -> None:
    """A product's address that is made of a register which nothing has written."""
    found = unwritten(LOST)
    assert found[0] == "nothing has written UR22, which this reads: UIADD3 UR22, UP0, UR22, 0x2, URZ;"
    assert len(found) == 2 and "UR23" in found[1]
    right = LOST.replace("UR22, 0x2", "UR56, 0x2").replace("UR23, -0x7fffffe0", "URZ, -0x7fffffe0")
    assert unwritten(right) == []


def test_all_ways_count() -> None:
    """Both branches write, or one of them does not; what comes only in a loop's later rounds; a jump by a table."""
    assert unwritten(BRANCH) == []
    assert len(unwritten(BRANCH.replace("UMOV UR6, 0x2", "UMOV UR7, 0x2"))) == 1
    loop = ".L_x_1:\n	MOV R0, UR6;\n	UMOV UR6, 0x1;\n	@P0 BRA `(.L_x_1);\n	EXIT;\n"
    assert len(unwritten(loop)) == 1
    assert unwritten("	UMOV UR6, 0x0;\n" + loop) == []
    table = BRANCH.replace("@P0 BRA `(.L_x_1)", 'BRX R2 -0x1a0 (*"BRANCH_TARGETS .L_x_1"*)')
    assert unwritten(table.replace("UMOV UR6, 0x1", "NOP")) == []
    assert len(unwritten(table.replace('.L_x_1"', '.L_x_1,.L_x_2"'))) == 1
    assert [block.following for block in blocks_of(table)] == [[2], [3], [3], [], []]


def test_copies_count_where_they_are_used() -> None:
    """Half a pair is copied before it is there: right if it is made before the pair is used, wrong if not."""
    copied = "	UMOV UR9, UR33;\n	%sMOV R0, UR9;\n	EXIT;\n"
    assert unwritten(copied % "UIADD3.X UR9, URZ, 0x1, URZ, UP5, !UPT;\n	") == []
    assert [text.split(": ")[1] for text in unwritten(copied % "")] == ["MOV R0, UR9;"]


def test_routines_know_what_their_callers_wrote() -> None:
    """Two calls: what either has written before is known behind it."""
    text = inlined(ROUTINE.splitlines())
    assert unwritten(text) == [] and text.count("UMOV UR9") == 2 and "CALL" not in text
    assert len(unwritten(text.replace("MOV R0, UR8", "MOV R0, UR9"))) == 1


def test_registers_of_instructions() -> None:
    """Pairs, addresses of products and of memory, predicates that come first."""
    assert uniform("	UIMAD.WIDE.U32 UR4, UR5, UR6, UR4;") == ({4, 5, 6}, {4, 5})
    assert uniform("	UIADD3.64 UR16, UR36, UR12, URZ;") == ({12, 13, 36, 37}, {16, 17})
    assert uniform("	HGMMA.64x32x16.F32.BF16 R72, gdesc[UR28].tnspA, R72;") == ({28, 29, 30, 31}, set())
    assert uniform("	HGMMA.64x32x16.F32.BF16 R24, R88, gdesc[UR4].tnspB, R24;") == ({6, 7}, set())
    assert uniform("	@!P0 LDG.E.128 R88, desc[UR58][R128.64];") == ({58, 59}, set())
    assert uniform("	ULOP3.LUT UP0, UR3, UR4, 0x1, URZ, 0xc0, !UPT;") == ({4}, {3})
    assert uniform("	ISETP.GE.AND P0, PT, R0, UR9, PT;") == ({9}, set())
    assert overwritten("	@P0 LDG.E.128 R88, desc[UR58][R128.64];") == ["R88", "R89", "R90", "R91"]
    assert overwritten("	STG.E desc[UR58][R10.64], R3;") == overwritten("	ISETP.GE.AND P0, PT, R0, R9, PT;") == []
    assert overwritten("	HGMMA.64x8x16.F32.BF16 R24, R88, gdesc[UR4].tnspB, R24;") == ["R24", "R25", "R26", "R27"]
