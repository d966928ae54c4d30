"""HashChain: equal keys mean equal prefixes, with the same images, tenant and weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.engine.prefix_keys import KEY_BYTES, HashChain, ImageSpan, Salt, image_digest

SALT = Salt("tenant", "v1")
PAD = 9


def keys(token_ids: Sequence[int], images: Sequence[ImageSpan] = (), salt: Salt = SALT) -> list[bytes]:
    """Keys with hash blocks of four tokens."""
    return HashChain(salt, 4, token_ids, images).keys


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_keys_agree_exactly_as_far_as_complete_blocks_do(a: list[int], b: list[int]) -> None:
    """A key names everything before it, not its block alone."""
    same = [n for n in range(1, 1 + min(len(a), len(b)) // 4) if a[: 4 * n] == b[: 4 * n]]
    assert [n + 1 for n, (x, y) in enumerate(zip(keys(a), keys(b))) if x == y] == same
    assert len(set(keys(a))) == len(keys(a)) == len(a) // 4


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 5), max_size=9), max_size=6))
def test_growing_is_the_same_as_starting_long(parts: list[list[int]]) -> None:
    """Token by token or at once."""
    chain = HashChain(SALT, 4, [])
    for part in parts:
        chain.append(part)
    whole = [token for part in parts for token in part]
    assert chain.keys == keys(whole) and chain.num_tokens == len(whole)


def test_salt_separates_tenants_weights_and_block_sizes() -> None:
    """Also where the texts run into each other."""
    salts = [Salt("a", "bc"), Salt("ab", "c"), Salt("", "abc"), Salt("a", "b"), Salt("b", "a")]
    found = {keys([1, 2, 3, 4], salt=salt)[0] for salt in salts}
    found |= set(HashChain(salts[0], 2, [1, 2, 3, 4]).keys)
    assert len(found) == len(salts) + 2 and {len(key) for key in found} == {KEY_BYTES}


def test_large_ids_do_not_run_into_each_other() -> None:
    """Each id has a field of its own width."""
    assert len({keys(ids)[0] for ids in ([1, 0, 0, 0], [0, 1, 0, 0], [256, 0, 0, 0], [2**31 - 1, 0, 0, 0])}) == 4


def test_s05_another_image_changes_the_key_from_its_first_placeholder_on() -> None:
    """S05: same text, another image of the same size; one pixel; the same image; the order of two swapped."""
    red, green, dot = bytes([255, 0, 0] * 4), bytes([0, 255, 0] * 4), bytes([255, 0, 0] * 3 + [255, 0, 1])
    digests = [image_digest(pixels, (1, 2, 2)) for pixels in (red, green, dot)]
    text = [1] * 6 + [PAD] * 3 + [1] * 3 + [PAD] * 3 + [1] * 5
    a, b, c = ([ImageSpan(6, 3, digest), ImageSpan(12, 3, digests[0])] for digest in digests)
    for other in (b, c):
        assert keys(text, a)[0] == keys(text, other)[0]
        assert not set(keys(text, a)[1:]) & set(keys(text, other)[1:])
    swapped = [ImageSpan(6, 3, digests[1]), ImageSpan(12, 3, digests[0])]
    back = [ImageSpan(6, 3, digests[0]), ImageSpan(12, 3, digests[1])]
    assert not set(keys(text, swapped)[1:]) & set(keys(text, back)[1:])
    assert keys(text, a) == keys(text, [ImageSpan(6, 3, image_digest(bytearray(red), (1, 2, 2))), a[1]])
    assert not set(keys(text, a)[1:]) & set(keys(text)[1:])


@pytest.mark.parametrize("same_bits", [16, 32, 64, 248])
def test_s05_the_whole_digest_counts(same_bits: int) -> None:
    """S05: two images whose digests agree in their last bits, or in all but the first byte."""
    first = bytes(range(KEY_BYTES))
    other = bytes(255 - b for b in first[: KEY_BYTES - same_bits // 8]) + first[KEY_BYTES - same_bits // 8 :]
    assert first[-same_bits // 8 :] == other[-same_bits // 8 :]
    assert keys([PAD] * 4, [ImageSpan(0, 4, first)]) != keys([PAD] * 4, [ImageSpan(0, 4, other)])


def test_s05_position_and_extent_of_an_image_count() -> None:
    """S05: the same ids and image, but which placeholders are the image's differs."""
    digest = image_digest(b"x", (1, 2, 2))
    spans = [(0, 4), (1, 3), (0, 3), (0, 8), (1, 7)]
    assert len({keys([PAD] * 8, [ImageSpan(*span, digest)])[0] for span in spans}) == len(spans)
    assert image_digest(b"x", (1, 2, 2)) != image_digest(b"x", (1, 4, 1)) != image_digest(b"y", (1, 4, 1))


def test_an_image_over_several_blocks_is_in_each_of_their_keys() -> None:
    """Blocks inside an image have equal tokens and differ by the image only."""
    chains = [keys([PAD] * 12, [ImageSpan(2, 9, image_digest(pixel, (1, 6, 6)))]) for pixel in (b"a", b"b")]
    assert not set(chains[0]) & set(chains[1])


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (ImageSpan(2, 3, bytes(32)), "image 1: tokens 2 . 3 overlap"),
        (ImageSpan(6, 3, bytes(32)), "image 1: tokens 6 . 3 overlap others or the end"),
        (ImageSpan(5, 0, bytes(32)), "image 1: tokens 5 . 0"),
        (ImageSpan(5, 2, bytes(8)), "image 1: a digest of 8 bytes, at least 32"),
    ],
)
def test_images_that_do_not_fit_are_refused(image: ImageSpan, message: str) -> None:
    """Overlap, beyond the end, empty, digest cut short."""
    with pytest.raises(ValueError, match=message):
        keys([PAD] * 8, [ImageSpan(0, 3, bytes(32)), image])
