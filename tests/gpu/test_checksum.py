"""CUDA checksums: the oracle's for arbitrary words; a changed message names its sender."""

import ctypes

import numpy as np
import pytest

from tests.gpu import device as d
from tests.oracle.checksums import sealed_numpy

WORDS = (1, 2, 3, 255, 256, 257, 4096, 4097, 4098, 20000)
NO_SENDER = -1
NONE = 2**64 - 1


class Checksum(ctypes.Structure):
    """RedsyncGpuChecksum."""

    _fields_ = [("messages", d.Pointer), ("rows", d.Int64), ("words", d.Int64)]
    _fields_ += [("senders", d.Pointer), ("out", d.Pointer)]


def run(device, messages, senders=None, *, in_place=False):
    """Returns the output, and the record's position if there were senders."""
    rows, words = messages.shape
    given = device.array(messages)
    out = given if in_place else device.array(np.full(rows * words + 1, -7, np.int32))
    from_ = None if senders is None else device.array(np.asarray(senders, np.int32))
    place = device.array(np.zeros(ctypes.sizeof(d.Record), np.uint8))
    pointers = [None if x is None else device.pointer(x) for x in (from_, out)]
    call = Checksum(device.pointer(given), rows, words, *pointers)
    size = device.library.redsync_gpu_checksum_scratch_bytes(ctypes.byref(call))
    scratch = device.array(np.full(max(size, 1), 0xA5, np.uint8))
    record = None if senders is None else d.Pointer(device.pointer(place))
    arguments = (ctypes.byref(call), record, d.Pointer(device.pointer(scratch)))
    function = device.library.redsync_gpu_checksum
    if size > 0:
        assert function(*arguments, d.Int64(size - 1), None) == 2, "too little scratch memory"
    status = function(*arguments, d.Int64(size), None)
    if status == 1:
        raise ValueError("an argument is invalid")
    assert status == d.OK
    found = device.get(out).ravel()
    if not in_place:
        assert found[-1] == -7, "memory next to the output has changed"
    position = None
    if senders is not None:
        position = d.Record.from_buffer_copy(device.get(place).tobytes()).position
    return found[: rows * words].reshape(rows, words), position


def messages(rng, rows, words):
    plain = rng.integers(-(2**31), 2**31, (rows, words)).astype(np.int32)
    plain[:, 0] = rng.integers(0, 2, rows)
    return plain


@pytest.mark.parametrize("words", WORDS)
def test_checksums_equal_the_oracle(device, words):
    rng = np.random.default_rng(words)
    plain = messages(rng, 3, words)
    plain[1, 1:] = -1  # the largest words
    expected = sealed_numpy(plain)
    sealed, _ = run(device, plain)
    np.testing.assert_array_equal(sealed, expected)
    np.testing.assert_array_equal(run(device, plain, in_place=True)[0], expected)
    opened, position = run(device, expected, [0, 1, 2])
    np.testing.assert_array_equal(opened, plain)
    assert position == NONE


def test_more_words_than_blocks_take_at_once(device):
    rng = np.random.default_rng(0)
    plain = messages(rng, 1, 256 * 256 * 16 + 1000)
    np.testing.assert_array_equal(run(device, plain)[0], sealed_numpy(plain))


def test_every_changed_word_is_detected(device):
    rng = np.random.default_rng(1)
    sealed = sealed_numpy(messages(rng, 1, 40))
    for at in range(40):
        for bit in (0, 15, 31):
            bad = sealed.copy()
            bad[0, at] ^= np.int32(1 << bit if bit < 31 else -(2**31))
            _, position = run(device, bad, [7])
            assert position == 7, (at, bit)


def test_lowest_sender_is_named_and_messages_without_sender_are_unchanged(device):
    rng = np.random.default_rng(2)
    plain = messages(rng, 6, 5000)
    sealed = sealed_numpy(plain)
    bad = sealed.copy()
    bad[[1, 3, 4], 17] ^= 1
    opened, position = run(device, bad, [NO_SENDER, NO_SENDER, 2, 3, 4, 5])
    assert position == 3
    np.testing.assert_array_equal(opened[:2], bad[:2])
    np.testing.assert_array_equal(opened[[2, 5]], plain[[2, 5]])


@pytest.mark.parametrize("flag", [2, -1, -(2**31)])
def test_invalid_flag_is_rejected(device, flag):
    plain = np.array([[flag, 1, 2], [1, 1, 2]], np.int32)
    sealed, _ = run(device, plain)
    assert run(device, sealed, [4, 5])[1] == 4


@pytest.mark.parametrize(("rows", "words"), [(1, 0), (-1, 5), (1, 2**31), (2**31, 5)])
def test_arguments_out_of_range(device, rows, words):
    call = Checksum(None, rows, words, None, None)
    scratch = d.Int64(2**62)
    function = device.library.redsync_gpu_checksum
    assert function(ctypes.byref(call), None, None, scratch, None) == 1


def test_opening_needs_a_record(device):
    on_device = device.array(np.zeros(8, np.int32))
    pointer = device.pointer(on_device)
    call = Checksum(pointer, 1, 4, pointer, pointer)
    function = device.library.redsync_gpu_checksum
    assert function(ctypes.byref(call), None, None, d.Int64(2**20), None) == 1


def test_no_messages(device):
    assert run(device, np.zeros((0, 5), np.int32))[0].shape == (0, 5)
