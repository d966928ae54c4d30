"""MXFP4 codes in registers to bfloat16 operands of tensor cores, in Gluon: a shift, a mask and a product for two codes.

The product is exact, so the values are those of `dequantize_mxfp4` bit for bit, subnormal ones and NaN included.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Of each of two words the four pairs of codes, see `packed._moves`; each times the factor in both halves of $10.
_PAIRS = """
    and.b32 a, {word}, 0x81C081C0;
    fma.rn.bf16x2 ${0}, a, {factor}, zero;
    shl.b32 a, {word}, 4;
    and.b32 a, a, 0x81C081C0;
    fma.rn.bf16x2 ${1}, a, {factor}, zero;
    shf.l.wrap.b32 a, {word}, {word}, 10;
    and.b32 a, a, 0x81C081C0;
    fma.rn.bf16x2 ${2}, a, {factor}, zero;
    shl.b32 a, {word}, 6;
    shr.u32 b, {word}, 2;
    and.b32 a, a, 0x80C080C0;
    lop3.b32 a, b, 0x01000100, a, 0xEA;
    fma.rn.bf16x2 ${3}, a, {factor}, zero;
"""
_WORDS = "".join(_PAIRS.format(*range(4 * i, 4 * i + 4), word=f"${8 + i}", factor=f"${10 + i}") for i in range(2))
UNPACK = gl.constexpr(f"{{ .reg .b32 a, b, zero; mov.b32 zero, 0x80008000; {_WORDS} }}")
# With 2^126 first, so that any scale can follow; "h" is half of what a word's pairs become.
_SCALED = "".join(f"fma.rn.bf16x2 ${n}, ${n}, ${10 + n // 4}, zero; " for n in range(8))
_WIDE = "".join(_PAIRS.format(*range(4 * i, 4 * i + 4), word=f"${8 + i}", factor="up") for i in range(2))
UNPACK_WIDE = gl.constexpr(
    f"{{ .reg .b32 a, b, zero, up; mov.b32 zero, 0x80008000; mov.b32 up, 0x7E807E80; {_WIDE} {_SCALED} }}"
)
OUTPUTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 4))
# 2^(s - 1) of a scale byte s <= 128, in both halves of a register.
FACTOR = gl.constexpr("{ .reg .b32 a; prmt.b32 a, $1, 0, $2; mad.lo.u32 $0, a, 128, 0x3F003F00; }")
# 2^(s - 127) of any scale byte: 2^-127 has no exponent, 255 is NaN.
FACTOR_WIDE = gl.constexpr(
    "{ .reg .b32 a, b, c; .reg .pred p; prmt.b32 a, $1, 0, $2; shl.b32 b, a, 7; and.b32 a, a, 255; "
    "or.b32 c, b, 0x00400040; setp.eq.u32 p, a, 0; selp.b32 b, c, b, p; setp.eq.u32 p, a, 255; selp.b32 $0, c, b, p; }"
)


@gluon.jit
def _factor(scales, BYTE: gl.constexpr, WIDE: gl.constexpr):
    """The factor of one of four scale bytes."""
    pick = gl.full_like(scales, 0x4040 + 0x0101 * BYTE)
    return gl.inline_asm_elementwise(FACTOR_WIDE if WIDE else FACTOR, "=r,r,r", [scales, pick], gl.int32, True, 1)


@gluon.jit
def factors(scales, PART: gl.constexpr, layouts: gl.constexpr, WIDE: gl.constexpr):
    """The factor of each word [rows, 16] of a unit's first or second 16 rows, from a unit's scales [rows / 2, 4]."""
    HALF: gl.constexpr = scales.shape[0]
    both = gl.join(_factor(scales, 2 * PART, WIDE), _factor(scales, 2 * PART + 1, WIDE))
    both = both.reshape([HALF // 8, 8, 4, 2]).permute(0, 3, 1, 2).reshape([2 * HALF, 4, 1])
    both = both.broadcast_to([2 * HALF, 4, 4]).reshape([2 * HALF, 16])
    return gl.convert_layout(both, layouts[1], assert_trivial=True)


@gluon.jit
def unpack(codes, factor, layouts: gl.constexpr, WIDE: gl.constexpr):
    """Values [rows, 128] of codes [rows, 16], as the left operand of a product.

    Column 32 q + 2 r + h lies where the operand's column 8 r + 2 q + h is, so that a lane reads whole blocks.
    """
    o = gl.inline_asm_elementwise(
        UNPACK_WIDE if WIDE else UNPACK, OUTPUTS, [codes, factor], (gl.bfloat16,) * 8, True, 2
    )
    even = gl.join(gl.join(o[0], o[4]), gl.join(o[2], o[6]))
    odd = gl.join(gl.join(o[1], o[5]), gl.join(o[3], o[7]))
    R: gl.constexpr = codes.shape[0]
    values = gl.join(even, odd).reshape([R, 4, 2, 2, 2, 2, 2]).permute(0, 2, 4, 5, 6, 1, 3).reshape([R, 128])
    return gl.convert_layout(values, gl.DotOperandLayout(0, layouts[0], 2), assert_trivial=True)


@gluon.jit
def tokens_operand(x, layouts: gl.constexpr):
    """Rows of tokens [N, 64], two bfloat16 values in an int32 each, as the right operand [128, N] of such a product."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $3;", "=r,=r,r,r", [x], (gl.bfloat16, gl.bfloat16), True, 2
    )
    N: gl.constexpr = x.shape[0]
    b = gl.join(first, second).reshape([N, 4, 8, 2, 2]).permute(2, 4, 1, 3, 0).reshape([128, N])
    return gl.convert_layout(b, gl.DotOperandLayout(1, layouts[0], 2), assert_trivial=True)


def compile_cases(arch: int) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """No kernel of its own."""
    return []
