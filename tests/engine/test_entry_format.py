"""EntryFormat: an entry is taken for itself only, whole, and of the same layout; one changed bit makes it a miss."""

from __future__ import annotations

import dataclasses

import pytest
from engine_model import cache_config, engine_config
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.engine.boundary import PAGE, TAIL
from openk3.engine.entry_format import HEADER_BYTES, NAME_BYTES, EntryFormat, layout_digest

KEY = bytes(range(32))


def layout(**changes: int) -> bytes:
    """Of small pages."""
    return layout_digest(cache_config(**changes).pages, engine_config(), "torch.float64")


def entry(form: EntryFormat, payload: bytes = b"latents!" * 9, kind: str = PAGE) -> tuple[memoryview, bytes]:
    """A sealed one and its name."""
    data = memoryview(bytearray(HEADER_BYTES) + bytearray(payload))
    name = form.name(kind, KEY)
    form.seal(data, kind, name)
    return data, name


def test_an_entry_is_itself() -> None:
    """As written; not under another name or kind, not cut short or longer, not of another layout or secret."""
    form = EntryFormat(layout())
    data, name = entry(form)
    assert form.is_intact(data, PAGE, name) and len(name) == NAME_BYTES
    assert not form.is_intact(data, TAIL, name) and not form.is_intact(data, PAGE, form.name(PAGE, KEY[::-1]))
    for end in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(data) - 1):
        assert not form.is_intact(data[:end], PAGE, name)
    assert not form.is_intact(memoryview(bytes(data) + b"\0"), PAGE, name)
    assert not form.is_intact(memoryview(bytes(len(data))), PAGE, name)
    keyed = EntryFormat(layout(), b"secret")
    assert not keyed.is_intact(data, PAGE, name), "made without the secret"
    data, name = entry(keyed)
    assert keyed.is_intact(data, PAGE, name) and not form.is_intact(data, PAGE, name)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from((b"", b"secret")))
def test_any_changed_bit_is_seen(data: st.DataObject, secret: bytes) -> None:
    """Anywhere, in header or payload."""
    form = EntryFormat(layout(), secret)
    sealed, name = entry(form)
    place = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[place // 8] ^= 1 << place % 8
    assert not form.is_intact(sealed, PAGE, name)


def test_names_differ_with_all_that_gives_bytes_a_meaning() -> None:
    """Kind, key, page size, hash size, model, dtype, secret; the same in another process."""
    model = engine_config()
    changed = dataclasses.replace(model, text=dataclasses.replace(model.text, rms_norm_eps=1e-4))
    pages = cache_config().pages
    layouts = [
        layout(),
        layout(page_tokens=16),
        layout(hash_tokens=4),
        layout_digest(pages, changed, "torch.float64"),
        layout_digest(pages, model, "torch.float32"),
    ]
    names = {
        EntryFormat(one, secret).name(kind, KEY) for one in layouts for secret in (b"", b"s") for kind in (PAGE, TAIL)
    }
    assert len(names) == 20
    assert EntryFormat(bytes(32)).name(PAGE, KEY).hex().startswith("bdf44450")
    assert EntryFormat(layout()).name(PAGE, KEY) == EntryFormat(layout()).name(PAGE, KEY)


def test_a_long_secret_is_as_good() -> None:
    """Of any length."""
    with pytest.raises(TypeError):
        EntryFormat(layout(), "text")  # pyrefly: ignore
    assert EntryFormat(layout(), b"a" * 100).name(PAGE, KEY) != EntryFormat(layout(), b"a" * 99).name(PAGE, KEY)
