"""Packed: joining, image expansion, padding both ways, labels and refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from openk3.inputs.packed import IGNORE, Packed

MEDIA = 9


def image(t=1, h=2, w=2):
    return torch.rand(t * h * w, 3, 14, 14), (t, h, w)


def test_join_keeps_order_and_bounds():
    packed = Packed.join([[1, 2, 3], [], np.array([4]), torch.tensor([5, 6], dtype=torch.int32)])
    assert packed.token_ids_T.tolist() == [1, 2, 3, 4, 5, 6] and packed.token_ids_T.dtype == torch.int64
    assert packed.cu_seqlens.tolist() == [0, 3, 3, 4, 6] and packed.cu_seqlens.dtype == torch.int32
    assert packed.lengths.tolist() == [3, 0, 1, 2] and packed.num_sequences == 4 and packed.num_tokens == 6
    assert packed.position_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.sequence_T.tolist() == [0, 0, 0, 2, 3, 3]
    assert packed.shifted_labels().tolist() == [2, 3, IGNORE, IGNORE, 6, IGNORE]


@pytest.mark.parametrize("sequences", [[], [[]], [[], []], [torch.empty(0)]])
def test_nothing_is_a_batch_too(sequences):
    packed = Packed.join(sequences).expand(MEDIA)
    assert packed.num_tokens == 0 and packed.num_sequences == len(sequences)
    assert packed.shifted_labels().tolist() == [] and packed.position_T.tolist() == []
    assert packed.to_padded(torch.empty(0, 5)).shape == (len(sequences), 0, 5)


def test_empty_sequences_at_both_ends_do_not_move_labels():
    packed = Packed.join([[], [7, 8], [], []], labels=[[], [IGNORE, 8], [], []])
    assert packed.shifted_labels().tolist() == [8, IGNORE]


def test_expand_spreads_each_placeholder_and_hides_its_labels():
    packed = Packed.join([[1, MEDIA, 2], [3], [MEDIA, MEDIA]], images=[image(1, 4, 2), image(3), image(1, 2, 6)])
    grown = packed.expand(MEDIA)
    assert grown.token_ids_T.tolist() == [1, MEDIA, MEDIA, 2, 3, MEDIA, MEDIA, MEDIA, MEDIA]
    assert grown.cu_seqlens.tolist() == [0, 4, 5, 9] and grown.expanded
    assert grown.labels_T.tolist() == [1, IGNORE, IGNORE, 2, 3, IGNORE, IGNORE, IGNORE, IGNORE]
    assert grown.shifted_labels().tolist() == [IGNORE, IGNORE, 2, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE]
    assert grown.expand(MEDIA) is grown
    assert packed.token_ids_T.tolist() == [1, MEDIA, 2, 3, MEDIA, MEDIA]


def test_expand_keeps_given_labels():
    packed = Packed.join([[1, MEDIA, 2, 3]], [image(1, 4, 2)], labels=[[IGNORE, 5, IGNORE, 3]])
    assert packed.expand(MEDIA).labels_T.tolist() == [IGNORE, IGNORE, IGNORE, IGNORE, 3]


def test_expanded_input_is_accepted_as_it_is():
    ids = [[1, MEDIA, MEDIA, 2], [MEDIA, MEDIA, MEDIA]]
    packed = Packed.join(ids, [image(1, 4, 2), image(1, 6, 2)]).expand(MEDIA)
    assert packed.token_ids_T.tolist() == [*ids[0], *ids[1]] and packed.lengths.tolist() == [4, 3]
    assert packed.labels_T.tolist() == [1, IGNORE, IGNORE, 2, IGNORE, IGNORE, IGNORE]


@pytest.mark.parametrize(
    ("sequences", "images", "words"),
    [
        ([[1, 2]], [image()], "0 placeholders .* 1 images"),
        ([[MEDIA, MEDIA]], [], "2 placeholders .* 0 images"),
        ([[MEDIA, MEDIA, MEDIA]], [image(1, 4, 2)], r"3 placeholders .* 1 images \(2 image tokens\)"),
        ([[MEDIA, 1, MEDIA]], [image(1, 4, 2)], "2 placeholders of image 0"),
        ([[MEDIA], [MEDIA]], [image(1, 4, 2)], "2 placeholders of image 0"),
    ],
)
def test_wrong_placeholder_counts_name_both(sequences, images, words):
    with pytest.raises(ValueError, match=words) as error:
        Packed.join(sequences, images).expand(MEDIA)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sequences", "words"),
    [
        ([[1], [1.5, 2.0]], "sequence 1: token ids must be integers, got torch.float32"),
        ([[True, False]], "torch.bool"),
        ([[1, -1]], "-1 at position 1"),
        ([[-100]], "sequence 0: -100 at position 0"),
        ([[2**31]], "2147483648 at position 0"),
        ([[2**70]], "sequence 0: expected a flat list"),
        ([[[1, 2]]], r"sequence 0: expected one flat list of integers, got shape \[1, 2\]"),
        ([[1, [2]]], "sequence 0"),
        (["abc"], "sequence 0"),
        ([3], "got shape"),
    ],
)
def test_bad_ids_are_refused_in_one_line(sequences, words):
    with pytest.raises(ValueError, match=words) as error:
        Packed.join(sequences)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([[1]], "labels 0: 1 labels for 2 tokens"),
        ([], "0 sequences of labels for 1"),
        ([[1, -5]], "-5 at position 1"),
        ([[1, 2], [3]], "2 sequences of labels for 1"),
        ([[0.5, 1.0]], "integers"),
    ],
)
def test_bad_labels_are_refused(labels, words):
    with pytest.raises(ValueError, match=words):
        Packed.join([[1, 2]], labels=labels)


@pytest.mark.parametrize(
    ("pixels", "grid", "words"),
    [
        (torch.rand(4, 3, 14, 14), (1, 4, 4), "16 patches"),
        (torch.rand(3, 3, 14, 14), (1, 3, 1), "even"),
        (torch.rand(4, 3 * 196), (1, 2, 2), "do not hold"),
        (torch.rand(0, 3, 14, 14), (0, 2, 2), "grid"),
        (torch.zeros(4, 3, 14, 14, dtype=torch.uint8), (1, 2, 2), "floating point"),
        (torch.rand(4, 3, 14, 14), (1, 2.5, 2), "must be .frames, rows, columns."),
        (torch.rand(4, 3, 14, 14), (2, 2), "must be .frames, rows, columns."),
        (torch.rand(4, 3, 14, 14), 4, "must be .frames, rows, columns."),
        (torch.rand(4, 3, 14, 14), "122", "must be .frames, rows, columns."),
        (torch.rand(4, 3, 14, 14), torch.tensor([[1, 2, 2]]), r"grid \[\[1, 2, 2\]\] must be"),
        ("a.png", (1, 2, 2), "pixels"),
        (None, (1, 2, 2), "pixels"),
    ],
)
def test_bad_images_are_refused(pixels, grid, words):
    with pytest.raises(ValueError, match=f"image 0: .*{words}"):
        Packed.join([[MEDIA]], [(pixels, grid)])


@pytest.mark.parametrize("images", [[torch.rand(4, 3, 14, 14)], image(), ["ab"], [image() + (1,)]])
def test_images_are_pairs(images):
    with pytest.raises(ValueError, match=r"image 0: expected \(pixels, \(frames, rows, columns\)\)"):
        Packed.join([[MEDIA]], images)


def test_reversed_and_strided_arrays_are_read_as_they_look():
    ids, pixels = np.arange(10), np.random.default_rng(0).random((4, 3, 14, 14), np.float32)
    packed = Packed.join([ids[::-2], torch.arange(10)[::3]], [(pixels[::-1, :, ::-1], np.array([2, 2, 1])[[2, 0, 1]])])
    assert packed.token_ids_T.tolist() == [9, 7, 5, 3, 1, 0, 3, 6, 9]
    assert packed.images[0].pixels_N3PP[3, 1, 13, 5] == pixels[0, 1, 0, 5] and packed.images[0].grid_thw == (1, 2, 2)
    assert type(packed.images[0].grid_thw[0]) is int
    table = np.arange(6).reshape(2, 3)
    assert Packed.from_padded(table[:, ::-1], table[::-1] > -1).token_ids_T.tolist() == [2, 1, 0, 5, 4, 3]


def test_padded_round_trip_left_right_and_both():
    """K08: any padding is dropped before the model and put back after it."""
    ids = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 0, 0, 0], [0, 6, 7, 0, 0], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    packed = Packed.from_padded(ids, mask, labels_BT=ids)
    assert packed.lengths.tolist() == [3, 2, 2, 0, 5]
    assert packed.token_ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5]
    assert packed.shifted_labels().tolist() == [2, 3, -100, 5, -100, 7, -100, 2, 3, 4, 5, -100]
    assert torch.equal(packed.to_padded(packed.token_ids_T), ids)
    values = torch.rand(12, 2, 3, requires_grad=True)
    out = packed.to_padded(values, fill=-1)
    assert out.shape == (5, 5, 2, 3) and torch.equal(out[mask.bool()], values) and bool((out[mask == 0] == -1).all())
    out[mask == 1].sum().backward()
    assert torch.equal(values.grad, torch.ones_like(values))


@pytest.mark.parametrize("mask", [[[1, 0, 1]], [[0, 1, 0]], [[1, 1, 1]]])
def test_holes_are_refused_and_runs_are_not(mask):
    if mask == [[1, 0, 1]]:
        with pytest.raises(ValueError, match="row 0 has padding between"):
            Packed.from_padded([[1, 2, 3]], mask)
    else:
        assert Packed.from_padded([[1, 2, 3]], mask).num_tokens == sum(mask[0])


@pytest.mark.parametrize(
    ("ids", "mask", "labels", "words"),
    [
        ([[1, 2]], [[1]], None, "one .batch, length. shape"),
        ([1, 2], [1, 1], None, "one .batch, length. shape"),
        ([[1, 2]], [[1, 1]], [[1]], "one .batch, length. shape"),
        ([[1, 2]], [[1, 2]], None, "only 0"),
        ([[1, -2]], [[1, 1]], None, "-2"),
        ([[1.0, 2.0]], [[1, 1]], None, "integers"),
        ([[1, 2], [3]], [[1, 1], [1, 1]], None, "from_padded ids"),
        ([[1, 2]], None, None, "from_padded mask"),
    ],
)
def test_bad_padded_batches_are_refused(ids, mask, labels, words):
    with pytest.raises(ValueError, match=words):
        Packed.from_padded(ids, mask, labels)


def test_pad_positions_may_hold_any_id():
    assert Packed.from_padded([[-1, 5]], [[0, 1]]).token_ids_T.tolist() == [5]


def test_expanded_left_padding_stays_left():
    packed = Packed.from_padded([[0, 0, 1], [2, MEDIA, 3]], [[0, 0, 1], [1, 1, 1]], images=[image(1, 4, 4)])
    grown = packed.expand(MEDIA)
    assert grown.to_padded(grown.token_ids_T).tolist() == [[0, 0, 0, 0, 0, 1], [2, 9, 9, 9, 9, 3]]


def test_expanded_right_padding_stays_right():
    packed = Packed.from_padded([[1, 0, 0], [2, MEDIA, 3]], [[1, 0, 0], [1, 1, 1]], images=[image(1, 4, 4)])
    grown = packed.expand(MEDIA)
    assert grown.to_padded(grown.token_ids_T).tolist() == [[1, 0, 0, 0, 0, 0], [2, 9, 9, 9, 9, 3]]


def test_a_full_row_of_a_right_padded_batch_stays_left():
    packed = Packed.from_padded([[1, 2, 3], [MEDIA, 0, 0]], [[1, 1, 1], [1, 0, 0]], images=[image(1, 4, 4)])
    grown = packed.expand(MEDIA)
    assert grown.to_padded(grown.token_ids_T).tolist() == [[1, 2, 3, 0], [9, 9, 9, 9]]


def test_joined_batches_pad_right():
    packed = Packed.join([[1], [2, 3, 4], []])
    assert packed.to_padded(packed.token_ids_T, fill=-1).tolist() == [[1, -1, -1], [2, 3, 4], [-1, -1, -1]]
    with pytest.raises(ValueError, match="3 values for 4 tokens"):
        packed.to_padded(torch.zeros(3))
    packed = Packed.join([[1, MEDIA]], [image(1, 4, 4)])
    with pytest.raises(ValueError, match=r"5 values for 2 tokens; expand\(media_token_id\) the batch first"):
        packed.to_padded(torch.zeros(5))
    assert packed.expand(MEDIA).to_padded(torch.zeros(5)).shape == (1, 5)


def test_to_moves_everything():
    packed = Packed.join([[MEDIA]], [image()], labels=[[1]]).to("meta")
    assert packed.token_ids_T.is_meta and packed.images[0].pixels_N3PP.is_meta and packed.labels_T.is_meta


@given(st.lists(st.lists(st.integers(0, 8), max_size=6), max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_expansion_equals_a_loop(rows, data):
    """Every placement of images expands as a plain loop over tokens does, labels and bounds included."""
    rows = [[MEDIA if t == 8 else t for t in row] for row in rows]
    count = sum(row.count(MEDIA) for row in rows)
    grids = [(data.draw(st.integers(1, 4)), 2 * data.draw(st.integers(1, 3)), 2) for _ in range(count)]
    images = [(torch.zeros(t * h * w, 3, 2, 2), (t, h, w)) for t, h, w in grids]
    grown = Packed.join(rows, images).expand(MEDIA)
    left, want, sizes = list(grids), [], []
    for row in rows:
        out = []
        for token in row:
            repeat = left.pop(0)[1] // 2 if token == MEDIA else 1
            out += [token] * repeat
        want += out
        sizes.append(len(out))
    assert grown.token_ids_T.tolist() == want and grown.lengths.tolist() == sizes
    labels = want if grown.labels_T is None else grown.labels_T.tolist()
    assert labels == [IGNORE if t == MEDIA else t for t in want]
    assert Packed.join([grown.token_ids_T], images).num_tokens == grown.num_tokens


@pytest.mark.parametrize(
    ("cu_seqlens", "words"),
    [
        ([0, 2], r"cu_seqlens: must ascend from 0 to the 3 tokens, got \[0, 2\]"),
        ([0, 5], "must ascend"),
        ([1, 3], "must ascend"),
        ([0, 3, 1, 3], "must ascend"),
        ([], "cu_seqlens: must"),
        ([[0, 3]], "cu_seqlens: must be a flat tensor of integers"),
        ([0.0, 3.0], "cu_seqlens: must be a flat tensor"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(cu_seqlens: list[int], words: str) -> None:
    """A Packed made by hand, not by `join`."""
    ids_T = torch.tensor([1, 2, 3])
    with pytest.raises(ValueError, match=words):
        Packed(ids_T, torch.tensor(cu_seqlens))
    with pytest.raises(ValueError, match="token_ids_T: must be a flat tensor"):
        Packed([1, 2, 3], torch.tensor([0, 3]))  # pyrefly: ignore
    with pytest.raises(ValueError, match="labels_T: 2 labels for 3 tokens"):
        Packed(ids_T, torch.tensor([0, 3]), labels_T=ids_T[:2])
    assert Packed(ids_T, torch.tensor([0, 0, 3], dtype=torch.int32)).lengths.tolist() == [0, 3]


def test_shifted_labels_of_empty_sequences() -> None:
    """Empty sequences first, between, last and alone change no label of the others."""
    packed = Packed.join([[], [1, 2, 3], [], [], [4], [5, 6], []])
    assert packed.shifted_labels().tolist() == [2, 3, -100, -100, 6, -100]
    assert Packed.join([[], []]).shifted_labels().tolist() == Packed.join([]).shifted_labels().tolist() == []


class NothingFromTheCpu(TorchDispatchMode):
    """Refuses what copies a number to the device, as a CUDA graph that is being captured does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "index_put" not in str(func) and "lift_fresh" not in str(func), func
        return func(*args, **(kwargs or {}))


def test_labels_are_shifted_on_their_device_alone() -> None:
    """A graph of a training step may hold it; assigning a number would make a CPU tensor first."""
    packed = Packed.join([[], [1, 2, 3], [4]])
    with NothingFromTheCpu():
        assert packed.shifted_labels().tolist() == [2, 3, IGNORE, IGNORE]
        with pytest.raises(AssertionError, match="aten"):
            packed.token_ids_T.clone()[packed.cu_seqlens[1:].long() - 1] = IGNORE
