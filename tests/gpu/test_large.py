"""CUDA kernels at the end of tensors beyond 2^31 elements, without computing or storing them.

Memory is mapped and allocated only where it is touched, and the emulator runs only the first and
the last blocks of a launch. Results that combine all blocks (the choice of a selection, the list of
a Bloom query) are not covered.
"""

import contextlib
import ctypes
import mmap

import numpy as np
import pytest

from tests.gpu import codec_structs as structs
from tests.gpu import device as d
from tests.gpu.codec_calls import MODES, run
from tests.oracle.quantization import code_numpy, philox_numpy, to_bits, value_numpy

LARGEST = 2**32 - 1
WITHOUT_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap lacks
END = 1000  # elements that are checked


def mapped(size: int, dtype=np.float32) -> np.ndarray:
    """Returns zeros that take memory only where they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | WITHOUT_RESERVE
    return np.frombuffer(mmap.mmap(-1, size * 4, flags=flags), dtype)


@pytest.fixture
def emulator(device):
    if not isinstance(device, d.Emulated):
        pytest.skip("only the emulator can run part of a launch")
    return device


@contextlib.contextmanager
def window(emulator, blocks: int = 2):
    """Runs only the first and the last blocks of every launch."""
    emulator.library.emulator_window(blocks)
    try:
        yield
    finally:
        emulator.library.emulator_window(0)


def words(positions) -> np.ndarray:
    """Returns positions as int32 words."""
    return np.asarray(positions).astype(np.uint32).view(np.int32)


def decoded(emulator, indices):
    """Returns the total of two equal messages with values 1, 2, .., and the error."""
    size, slots = LARGEST, len(indices)
    values = np.arange(1, 1 + slots, dtype=np.float32)
    row = np.concatenate([[1, slots], words(indices), values.view(np.int32)]).astype(np.int32)
    messages, total = emulator.array(np.stack([row, row])), mapped(size)
    parts = (d.Part * 1)(d.Part(1, slots, size, 0, emulator.pointer(total)))
    call = d.Decode(emulator.pointer(messages), 2, row.size, parts, 1)
    record, error = d.Record(), d.Error()
    with window(emulator):
        status = emulator.library.redsync_gpu_sum_messages(
            ctypes.byref(call), ctypes.byref(record), None
        )
    assert status == d.OK
    found = emulator.library.redsync_gpu_explain_sum_messages(
        ctypes.byref(call), ctypes.byref(record), ctypes.byref(error)
    )
    return total, error if found else None


def test_decode_large_tensor(emulator):
    end = [LARGEST - 8191, LARGEST - 700, LARGEST - 2, LARGEST - 1]
    total, error = decoded(emulator, [5, 2**31 - 1, 2**31, *end])
    assert error is None
    assert (total[end] == 2 * np.arange(4, 8)).all() and total[5] == 2
    assert np.count_nonzero(total[-2 * 8192 :]) == len(end)


@pytest.mark.parametrize(
    ("indices", "slot"), [([5, 2**31, LARGEST], 2), ([2**31, 5, 6], 1), ([5, 2**31, 2**31], 2)]
)
def test_decode_bad_position(emulator, indices, slot):
    _, error = decoded(emulator, indices)
    assert (error.field, error.rank, error.slot, error.value) == (b"index", 0, slot, indices[slot])
    assert error.limit == LARGEST


def run_descend(emulator, indices, variable):
    """Descends along values 1, 2, ..; returns the record."""
    values = np.arange(1, 1 + len(indices), dtype=np.float32)
    on_device = [emulator.array(x) for x in (words(indices), values, np.float32([0.5]))]
    call = d.Descend(
        *map(emulator.pointer, on_device), len(indices), variable.size, emulator.pointer(variable)
    )
    record = d.Record()
    size = emulator.library.redsync_gpu_descend_scratch_bytes()
    scratch = emulator.array(np.full(size, 0xA5, np.uint8))
    arguments = (ctypes.byref(record), d.Pointer(emulator.pointer(scratch)), d.Int64(size))
    with window(emulator):
        assert emulator.library.redsync_gpu_descend(ctypes.byref(call), *arguments, None) == d.OK
    return record


def test_descend_along_a_large_variable(emulator):
    """Two runs that do not ascend as signed numbers."""
    variable = mapped(LARGEST)
    record = run_descend(emulator, [7, 2**31, LARGEST - 1, 3, LARGEST - 9, LARGEST - 1], variable)
    assert record.position == 2**64 - 1
    assert variable[-1] == -0.5 * 3 - 0.5 * 6 and variable[-9] == -0.5 * 5
    assert variable[7] == -0.5 and variable[3] == -0.5 * 4
    assert np.count_nonzero(variable[-END:]) == 2
    record = run_descend(emulator, [7, LARGEST], variable)
    assert record.position == 1 and record.value == LARGEST


@pytest.mark.parametrize("momentum", [0, 1])
def test_accumulation_at_the_end(emulator, momentum):
    rng = np.random.default_rng(0)
    size = LARGEST
    arrays = [mapped(size + 1) for _ in range(5)]
    pointers = [emulator.pointer(x) for x in arrays]
    for array in arrays:
        array[-END - 1 :] = rng.normal(size=END + 1)
    beyond = [x[-1] for x in arrays]
    grad, residual, velocity, new_residual, new_velocity = (x[:-1] for x in arrays)
    if not momentum:
        pointers[2] = pointers[4] = None
    tensors = (d.Tensor * 1)(d.Tensor(size, 9, d.SELECTORS["exact"], 0, *pointers))
    call = d.Select(tensors, 1, momentum, 1, 0.9 if momentum else 0.0)
    count = emulator.library.redsync_gpu_message_words(ctypes.byref(call))
    assert count == 1 + 1 + 2 * 9
    scalars = {
        "scale": np.float32([1]), "side": np.int32([1]), "search": np.array([True]),
        "ratios": np.float32([-1]), "new_ratios": np.zeros(1, np.float32),
        "message": np.zeros(count, np.int32),
    }  # fmt: skip
    on_device = {name: emulator.array(value) for name, value in scalars.items()}
    for name, value in on_device.items():
        setattr(call, name, emulator.pointer(value))
    bytes_ = emulator.library.redsync_gpu_select_scratch_bytes(ctypes.byref(call))
    scratch = mapped(bytes_ // 4 + 1, np.int32)
    with window(emulator):
        status = emulator.library.redsync_gpu_select(
            ctypes.byref(call), d.Pointer(emulator.pointer(scratch)), d.Int64(bytes_), None
        )
    assert status == d.OK
    u = np.float32(0.9) * velocity[-END:] + grad[-END:] if momentum else grad[-END:]
    assert (new_residual[-END:] == residual[-END:] + u).all()
    assert [x[-1] for x in arrays] == beyond
    if momentum:
        assert (new_velocity[-END:] == u).all()


@pytest.mark.parametrize(("mode", "levels"), [("sign", 1), ("stochastic", 3)])
@pytest.mark.parametrize("bucket_size", [None, 4096])
def test_codes_at_the_end(emulator, mode, levels, bucket_size):
    """Of 2^34 elements: the generator's counter uses its second word there."""
    size, seed, worker, step = 2**34 + 3 * 4096 + 77, 5, 6, 7
    bits = 1 if mode == "sign" else 3
    buckets = 1 if bucket_size is None else -(-size // bucket_size)
    x, errors, total = (mapped(size) for _ in range(3))
    x[-END:] = np.random.default_rng(1).normal(size=END)
    message = mapped(1 + buckets + -(-size * bits // 32), np.int32)
    scales = mapped(buckets)
    scales[-4:] = 2.5
    quantizer = structs.Quantizer(MODES[mode], levels, bucket_size or 0)
    dense = structs.Dense(size, emulator.pointer(x), emulator.pointer(errors))
    numbers = emulator.array(np.int32([seed, worker, step]))
    call = structs.Quantize(quantizer, (structs.Dense * 1)(dense), 1)
    call.scales, call.stream = map(emulator.pointer, (scales, numbers))
    call.message = emulator.pointer(message)
    with window(emulator):
        assert run(emulator, "quantize", call, record=True, scratch=4) is None

    element = np.arange(size - END, size, dtype=np.uint64)
    block = element // 4
    counter = np.stack([block % 2**32, block // 2**32, 0 * block, 0 * block + step], 1)
    random = philox_numpy(counter, (seed, worker))[np.arange(END), element % 4]
    u = (random >> 8).astype(np.float32) * np.float32(2.0**-24)
    codes = code_numpy(x[-END:], np.float32([2.5]), mode, levels, u)
    values = value_numpy(codes, np.float32([2.5]), mode, levels)
    first = (size - END) // 32  # the word of this group of 32 elements
    stream = to_bits(message[1 + buckets + first * bits :])
    stream = stream[(size - END - 32 * first) * bits :][: END * bits].reshape(END, bits)
    assert (stream @ (1 << np.arange(bits)) == codes).all()
    assert (errors[-END:] == x[-END:] - values).all()

    message[0], message[max(buckets - 3, 1) : buckets + 1] = 1, np.float32(2.5).view(np.int32)
    call = structs.Dequantize(quantizer, (structs.Dense * 1)(structs.Dense(size, None)), 1)
    call.tensors[0].output = emulator.pointer(total)
    call.messages, call.ranks, call.words = emulator.pointer(message), 1, message.size
    with window(emulator):
        assert run(emulator, "dequantize", call, record=True) is None
    assert (total[-END:] == values).all()
