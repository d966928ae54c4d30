"""Windows and micro-batches: every target once, images whole, documents apart, budgets kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openk3.data.documents import Block, DataError, Document
from openk3.data.packing import Origin, Span, Window, cut, next_span, pack, take

MEDIA, BEGIN, END = 90, 91, 92


def text_document(length: int, first: int = 0) -> Document:
    """Distinct ids first, first + 1, ...; everything but the first is a target."""
    targets = np.ones(length, dtype=bool)
    targets[:1] = False
    return Document("text", np.arange(first, first + length, dtype=np.int32), targets)


def mixed_document(pieces: list[int | tuple[int, int]]) -> Document:
    """Runs of text (a number of tokens) and images (rows, columns) with the prompts begin, 7, 8, media, end."""
    ids: list[int] = []
    images, blocks = [], []
    for piece in pieces:
        if isinstance(piece, int):
            ids += [100 + len(ids) + n for n in range(piece)]
            continue
        rows, columns = piece
        blocks.append(Block(len(ids), len(ids) + 3, len(ids) + 5))
        images.append((np.full((rows * columns, 3, 14, 14), len(images), np.float32), (1, rows, columns)))
        ids += [BEGIN, 7, 8, MEDIA, END]
    id_array = np.array(ids, dtype=np.int32)
    return Document("mixed", id_array, id_array >= 100, tuple(images), tuple(blocks))


pieces = st.lists(st.one_of(st.integers(1, 9), st.sampled_from([(2, 2), (2, 4), (4, 4)])), min_size=1, max_size=8)


@given(pieces, st.integers(10, 24))
def test_windows_cover_every_target_once(pieces: list[int | tuple[int, int]], seq_len: int) -> None:
    """Any document and window length: within the length, images whole, each target predicted exactly once."""
    document = mixed_document(pieces)
    predicted: list[int] = []
    shown: list[float] = []
    for span in cut(document, seq_len):
        packed = pack([Window(document, span)], MEDIA)
        assert packed.num_tokens == span.num_tokens <= seq_len
        labels_T = packed.shifted_labels()
        predicted += labels_T[labels_T >= 0].tolist()
        shown += [float(item.pixels_N3PP.max()) for item in packed.images]
    expected = document.ids[document.targets].tolist()
    assert predicted == expected[1:] if document.targets[0] else predicted == expected
    assert shown == sorted(set(shown))


def test_windows_share_one_token_of_context() -> None:
    """Ten tokens in windows of four: the last token of a window starts the next."""
    spans = list(cut(text_document(10), 4))
    assert spans == [Span(0, 4, 4), Span(3, 7, 4), Span(6, 10, 4)]


def test_length_may_change_between_windows() -> None:
    """The rest of a document is cut at the new length."""
    document = text_document(100)
    first = next_span(document, 0, 8)
    assert first == Span(0, 8, 8) and next_span(document, 8, 64) == Span(7, 71, 64)
    assert next_span(document, 100, 64) is None and next_span(text_document(1), 0, 64) is None


def test_windows_without_targets_are_left_out() -> None:
    """A long prompt without loss: windows that would only read it are dropped."""
    document = Document("chat", np.arange(100, dtype=np.int32), np.arange(100) >= 95)
    assert list(cut(document, 10)) == [Span(90, 100, 10)]


def test_image_that_fits_only_alone_goes_without_context() -> None:
    """A prompt as long as the window starts a window; a longer one is refused with its size."""
    document = mixed_document([3, (4, 4), 4])  # the image's prompt takes 4 + 4 tokens
    assert [(span.start, span.stop) for span in cut(document, 8)] == [(0, 3), (7, 12)]
    with pytest.raises(DataError, match="mixed: an image of 8 tokens does not fit a window of 7 tokens"):
        list(cut(document, 7))


def test_pack_sets_labels_images_and_boundaries() -> None:
    """Sequences stay apart, placeholders are expanded, non-targets are ignored."""
    windows = [Window(d, span) for d in (mixed_document([2, (2, 4), 2]), text_document(3)) for span in cut(d, 64)]
    packed = pack(windows, MEDIA)
    assert packed.expanded and packed.cu_seqlens.tolist() == [0, 10, 13]
    assert packed.token_ids_T.tolist() == [100, 101, BEGIN, 7, 8, MEDIA, MEDIA, END, 107, 108, 0, 1, 2]
    assert packed.shifted_labels().tolist() == [101, *[-100] * 6, 107, 108, -100, 1, 2, -100]
    assert packed.images[0].grid_thw == (1, 2, 4) and packed.token_ids_T.dtype == torch.int64


def windows_of_lengths(lengths: list[int], epochs: list[int] | None = None) -> list[Window]:
    """One-window documents, numbered in order."""
    epochs = epochs or [0] * len(lengths)
    return [
        Window(text_document(n), Span(0, n, n), Origin(0, epoch, index))
        for index, (n, epoch) in enumerate(zip(lengths, epochs, strict=True))
    ]


def test_take_fills_the_budget_from_what_is_near() -> None:
    """Windows that do not fit wait; those taken keep their order."""
    pending = windows_of_lengths([60, 50, 30, 20, 10])
    assert [window.span.num_tokens for window in take(pending, 100)] == [60, 30, 10]
    assert [window.span.num_tokens for window in pending] == [50, 20]
    assert [window.span.num_tokens for window in take(pending, 10)] == [50]


def test_take_never_lets_an_epoch_overtake() -> None:
    """A window that waits holds back its source's later epochs, but not its own epoch's windows or other sources'."""
    pending = windows_of_lengths([60, 50, 10, 10], [0, 0, 1, 0])
    assert [window.origin.index for window in take(pending, 100)] == [0, 3]
    assert [window.origin.index for window in pending] == [1, 2]


@given(st.lists(st.integers(2, 64), min_size=1, max_size=60), st.integers(64, 200))
def test_take_gives_everything_within_the_budget(lengths: list[int], budget: int) -> None:
    """Repeated until nothing is left: each window once, each batch within its budget."""
    pending = windows_of_lengths(lengths)
    given_out: list[int] = []
    while pending:
        batch = take(pending, budget)
        assert sum(window.span.num_tokens for window in batch) <= budget
        given_out += [window.origin.index for window in batch]
    assert sorted(given_out) == list(range(len(lengths)))
