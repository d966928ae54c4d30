"""Rings that are too short for products in flight are found, and only those."""

from __future__ import annotations

from product_pipelines import overwritten

# One block a round is copied ahead and read by a product; {slots} and {pendings} decide whether that is safe.
LOOP = """
    %block = ttg.local_alloc : () -> !ttg.memdesc<{slots}x16x128xbf16, #shared, #smem, mutable>
    %block_1 = ttg.memdesc_index %block[%c0_i32] : !ttg.memdesc<{slots}x16x128xbf16> -> !ttg.memdesc<16x128xbf16>
    %block_2 = ttg.async_copy_global_to_local %at_3, %block_1 mask %yes : tensor<16x128x!tt.ptr<bf16>> -> <16x128xbf16>
    %sum:3 = scf.for %round = %c0_i32 to %c8_i32 step %c1_i32 iter_args(%acc = %zero) -> (tensor<128x32xf32>)  : i32 {{
      %block_4 = ttg.memdesc_index %block[%slot] : !ttg.memdesc<{slots}x16x128xbf16> -> !ttg.memdesc<16x128xbf16>
      %sum_5 = ttng.warp_group_dot %block_4, %other, %acc {{inputPrecision = 0 : i32, isAsync = true}} : !ttg.memdesc<>
      %sum_6:2 = ttng.warp_group_dot_wait %sum_5, %block_4 {{pendings = {pendings} : i32}} : tensor<128x32xf32>
      %block_7 = ttg.memdesc_index %block[%next] : !ttg.memdesc<{slots}x16x128xbf16> -> !ttg.memdesc<16x128xbf16>
      %block_8 = ttg.async_copy_global_to_local %at_9, %block_7 mask %more : tensor<16x128x!tt.ptr<bf16>> -> <>
      scf.yield %sum_6#0, %next, %block_8 : tensor<128x32xf32>, i32, !ttg.async.token
    }}
    %sum_10 = ttng.warp_group_dot_wait %sum#0 {{pendings = 0 : i32}} : tensor<128x32xf32>
"""


def test_rings() -> None:
    """With one slot the product must be waited for; with two it may run on into the next round."""
    assert overwritten(LOOP.format(slots=1, pendings=1)) == [
        "ring %block of 1 slots is overwritten while products read it"
    ]
    assert overwritten(LOOP.format(slots=1, pendings=0)) == []
    assert overwritten(LOOP.format(slots=2, pendings=1)) == []
    assert overwritten("") == []
