"""LGC's convolutional autoencoder of vectors, and its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import tensorflow as tf

from tf_redsync import checks
from tf_redsync.methods.common.random_numbers import stream

TAPS, SLOPE = 3, 0.2


class _Layer(NamedTuple):
    """Shape of a layer: kernel as a matrix, bias, and number of terms of an output."""

    rows: int
    columns: int
    outputs: int
    terms: float


@dataclasses.dataclass(frozen=True)
class Autoencoder:
    """A convolutional autoencoder of vectors, as pure functions of a parameter vector.

        encoder   1 -> channels -> code_channels            each of `channels` halves the length
        decoder   code_channels -> decoder_channels -> 1    each of `decoder_channels` doubles it

    Kernels have 3 taps and stride 2, with a leaky ReLU. The last layers of encoder and decoder have
    one tap, stride 1 and no activation. With input x of a layer and taps W,

        convolution               y[t] = x[2t] W0 + x[2t + 1] W1 + x[2t + 2] W2
        transposed convolution    y[2t] = x[t] W0 + x[t - 1] W2,  y[2t + 1] = x[t] W1

    and zero padding. Both are one matrix product, in the forward and the backward pass. Convolution
    kernels would not save work, and some of them sum in a varying order on GPUs, so that workers
    would decode the same code to different bits.

    Attributes:
        channels: Widths of the convolutions of the encoder.
        decoder_channels: Widths of the transposed convolutions of the decoder, the same number.
        code_channels: Width of the code.
        innovation: Whether the last layer of the decoder has the innovation as an additional input.
    """

    channels: tuple[int, ...]
    decoder_channels: tuple[int, ...]
    code_channels: int
    innovation: bool = False

    def __post_init__(self) -> None:
        for name in ("channels", "decoder_channels"):
            _check_widths(name, getattr(self, name))
        checks.integer("code_channels", self.code_channels, low=1)
        received = f"Received: channels={self.channels}, "
        if len(self.channels) != len(self.decoder_channels):
            raise ValueError(
                "`decoder_channels` must have as many widths as `channels`, so that decoded "
                "vectors have the original length. "
                f"{received}decoder_channels={self.decoder_channels}"
            )
        if self.code_channels >= self.stride:
            raise ValueError(
                f"`code_channels` must be less than {self.stride}, the number of values per "
                "position of the code, so that the code is shorter. Use fewer `code_channels` or "
                f"more `channels`. {received}code_channels={self.code_channels}"
            )

    @property
    def stride(self) -> int:
        """Number of elements of a vector per position of its code."""
        return 2 ** len(self.channels)

    def padded(self, length: int) -> int:
        """Return `length` rounded up to a multiple of the stride, at least one stride."""
        return self.stride * max(1, -(-length // self.stride))

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(a.rows * a.columns + a.outputs for a in self._shapes)

    def initial(self, seed: int) -> tf.Tensor:
        """Return the initial parameters, float32 `[size]`, a function of the seed.

        Kernels are normal with variance 2 / (terms of an output), except for the weight of the
        innovation, which is 1. Biases are 0.
        """
        parts = []
        for i, a in enumerate(self._shapes):
            draw = stream(seed, tf.constant(i, tf.int64), -1)
            kernel = tf.random.stateless_normal([a.rows, a.columns], draw, alg="philox")
            parts += [kernel * (2.0 / a.terms) ** 0.5, tf.zeros([a.outputs])]
        if self.innovation:
            parts[-2] = tf.concat([parts[-2][:-1], tf.ones([1, 1])], axis=0)
        return tf.concat([tf.reshape(p, [-1]) for p in parts], axis=0)

    def encode(self, parameters: tf.Tensor, vectors: tf.Tensor) -> tf.Tensor:
        """Return the codes `[n, length / stride, code_channels]` of vectors `[n, length]`."""
        *layers, last = self._layers(parameters)[: len(self.channels) + 1]
        x = vectors[:, :, tf.newaxis]
        for kernel, bias in layers:
            x = tf.nn.leaky_relu(_convolved(x, kernel) + bias, SLOPE)
        return _product(x, last[0]) + last[1]

    def decode(
        self, parameters: tf.Tensor, codes: tf.Tensor, innovations: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Return the vectors of codes.

        Args:
            parameters: float32 `[size]`.
            codes: float32 `[n, length / stride, code_channels]`, from `encode`.
            innovations: float32 `[m, length]` if `innovation` is set, where n or m is 1 or both are
                equal.

        Returns:
            float32 `[max(n, m), length]`.
        """
        *layers, (kernel, bias) = self._layers(parameters)[len(self.channels) + 1 :]
        x, width = codes, self.decoder_channels[-1]
        for each in layers:
            x = tf.nn.leaky_relu(_transposed(x, each[0]) + each[1], SLOPE)
        result = _product(x, kernel[:width])[:, :, 0] + bias
        return result if innovations is None else result + kernel[width, 0] * innovations

    @property
    def _shapes(self) -> list[_Layer]:
        down = pairwise((1, *self.channels))
        up = pairwise((self.code_channels, *self.decoder_channels))
        code, width = self.channels[-1], self.decoder_channels[-1]
        inputs = width + int(self.innovation)
        return [
            *(_Layer(TAPS * a, b, b, TAPS * a) for a, b in down),
            _Layer(code, self.code_channels, self.code_channels, code),
            # Even outputs have two taps, odd ones have one.
            *(_Layer(a, TAPS * b, b, TAPS / 2 * a) for a, b in up),
            _Layer(inputs, 1, 1, inputs),
        ]

    def _layers(self, parameters: tf.Tensor) -> Sequence[tuple[tf.Tensor, tf.Tensor]]:
        """Return kernel and bias of every layer."""
        shapes = self._shapes
        parts = tf.split(parameters, [n for a in shapes for n in (a.rows * a.columns, a.outputs)])
        kernels, biases = parts[::2], parts[1::2]
        return [
            (tf.reshape(kernel, [a.rows, a.columns]), bias)
            for a, kernel, bias in zip(shapes, kernels, biases, strict=True)
        ]


def _check_widths(name: str, widths: tuple[int, ...]) -> None:
    if not widths:
        raise ValueError(
            f"`{name}` must be a tuple of at least one integer. Received: {name}={widths!r}"
        )
    for width in widths:
        checks.integer(name, width, low=1)


def _convolved(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """Convolve `[n, length, a]` with a kernel `[3 a, b]`: `[n, length / 2, b]`."""
    n, length, a = x.shape
    pairs = tf.reshape(x, [n, length // 2, 2 * a])
    following = tf.pad(pairs[:, 1:, :a], [[0, 0], [0, 1], [0, 0]])
    return _product(tf.concat([pairs, following], axis=2), kernel)


def _transposed(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """Convolve `[n, length, a]`, transposed, with a kernel `[a, 3 b]`: `[n, 2 length, b]`."""
    even, odd, following = tf.split(_product(x, kernel), TAPS, axis=2)
    even += tf.pad(following[:, :-1], [[0, 0], [1, 0], [0, 0]])
    n, length, b = even.shape
    return tf.reshape(tf.concat([even, odd], axis=2), [n, 2 * length, b])


def _product(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """Multiply `[n, length, a]` by `[a, b]`: `[n, length, b]`."""
    n, length, a = x.shape
    rows = tf.matmul(tf.reshape(x, [n * length, a]), kernel)
    return tf.reshape(rows, [n, length, kernel.shape[1]])


def weighted_mean(codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    """Return the mean `[1, ...]` of codes `[n, l, c]`, weighted by scales `[n, 1]`."""
    weighted = tf.reduce_sum(scales[:, :, tf.newaxis] * codes, axis=0, keepdims=True)
    return tf.math.divide_no_nan(weighted, tf.reduce_sum(scales))


def loss_gradient(
    model: Autoencoder,
    parameters: tf.Tensor,
    vectors: tf.Tensor,
    leader: tf.Tensor,
    innovation: int,
) -> tf.Tensor:
    """Return the gradient of LGC's loss, clipped to norm 1, float32 `[size]`.

    Args:
        model: The autoencoder.
        parameters: float32 `[size]`.
        vectors: float32 `[workers, length]`, values of all workers at the positions of one worker.
        leader: int32 scalar, rank of that worker.
        innovation: Number of elements of an innovation, if the model has one.
    """
    x, scales = normalised(vectors)
    with tf.GradientTape() as tape:
        tape.watch(parameters)
        codes = model.encode(parameters, x)
        if model.innovation:
            innovations = spread(*largest(x, innovation), x.shape[1])
            code = tf.gather(codes, leader)[tf.newaxis]
            errors = model.decode(parameters, code, innovations) - x
        else:
            target = weighted_mean(x[:, :, tf.newaxis], scales)[:, :, 0]
            errors = model.decode(parameters, weighted_mean(codes, scales)) - target
        between = codes - tf.reduce_mean(codes, axis=0, keepdims=True)
        # The mean squared difference of all pairs is twice the variance.
        loss = 0.5 * tf.reduce_mean(tf.square(errors)) + tf.reduce_mean(tf.square(between))
    return tf.clip_by_norm(tape.gradient(loss, parameters), 1.0)


def normalised(vectors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return vectors `[n, length]` divided by their root mean squares, and these `[n, 1]`."""
    scales = tf.sqrt(tf.reduce_mean(tf.square(vectors), axis=1, keepdims=True))
    return tf.math.divide_no_nan(vectors, scales), scales


def largest(vectors: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return places and values, `[n, count]`, of the largest elements of vectors `[n, length]`."""
    at = tf.math.top_k(tf.abs(vectors), count).indices
    return at, tf.gather(vectors, at, batch_dims=1)


def spread(at: tf.Tensor, values: tf.Tensor, length: int) -> tf.Tensor:
    """Scatter `values` to the places `at`, both `[n, m]`, of zero vectors `[n, length]`."""
    rows = tf.range(at.shape[0])[:, tf.newaxis] + tf.zeros_like(at)
    places_of_all = tf.stack([rows, at], axis=2)
    return tf.scatter_nd(places_of_all, values, [at.shape[0], length])
