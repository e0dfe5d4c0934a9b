"""Synthetic and real gradients for the selection benchmark."""

from __future__ import annotations

import functools

import numpy as np

INPUTS = ("normal", "laplace", "student_t", "constant", "outlier", "gradient")


def make(kind: str, n: int, seed: int = 0) -> np.ndarray:
    """A float32 vector.

    Args:
        kind: `normal`; `laplace`; `student_t` with 3 degrees of freedom; `constant`: all 0.01;
            `outlier`: normal, and one element of 10^6; `gradient`: gradients of a small network in
            training (see `network_gradients`), in a random order, repeated until there are `n`.
        n: elements.
        seed: of the generator.

    Raises:
        ValueError: for another kind.
    """
    rng = np.random.default_rng(seed)
    if kind == "constant":
        return np.full(n, 0.01, np.float32)
    if kind == "gradient":
        return np.resize(network_gradients(), n)
    if kind == "laplace":
        x = np.log(1 - rng.random(n, np.float32))
        x *= 1 - 2 * rng.integers(0, 2, n, np.int8)
        return x
    x = rng.standard_normal(n, np.float32)
    if kind == "student_t":
        x /= np.sqrt(rng.standard_gamma(1.5, n, np.float32) / np.float32(1.5))
    elif kind == "outlier":
        x[n // 2] = 1e6
    elif kind != "normal":
        raise ValueError(f"`kind` must be one of {', '.join(INPUTS)}. Received: {kind!r}.")
    return x


@functools.cache
def network_gradients() -> np.ndarray:
    """Gradients of a ReLU network 64-256-256-10, in a random order: about 1.4 million values.

    Recorded in 16 consecutive steps of SGD after 30 others, batches of 64 points around ten
    centers.
    """
    import tensorflow as tf

    rng = np.random.default_rng(0)
    centres = rng.standard_normal((10, 64)).astype(np.float32)
    sizes = (64, 256, 256, 10)
    weights = [
        tf.Variable((np.sqrt(2 / a) * rng.standard_normal((a, b))).astype(np.float32))
        for a, b in zip(sizes, sizes[1:], strict=False)
    ]

    @tf.function
    def gradients(x, labels):
        with tf.GradientTape() as tape:
            for weight in weights[:-1]:
                x = tf.nn.relu(x @ weight)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x @ weights[-1])
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, weights)

    taken = []
    for step in range(46):
        labels = rng.integers(0, 10, 64)
        x = centres[labels] + 1.5 * rng.standard_normal((64, 64)).astype(np.float32)
        found = gradients(tf.constant(x, tf.float32), tf.constant(labels))
        for weight, gradient in zip(weights, found, strict=True):
            weight.assign_sub(0.05 * gradient)
        if step >= 30:
            taken += [gradient.numpy().ravel() for gradient in found]
    return rng.permutation(np.concatenate(taken))
