"""The models of the benchmarks, with synthetic data: Keras 3, float32.

    python -m benchmarks.models        # prints the parameter counts

`mlp`  784-6x2048-10, ReLU, 22.6 M parameters: large dense matrices, little arithmetic.
`lstm` word language model: embedding 650, two LSTM layers of 650, vocabulary 10,000, 35 steps.
`charlm` the small character transformer of `benchmarks/convergence.py`, 0.24 M parameters.
`vgg`  the 13 convolutions of VGG16 on 32x32x3 and two dense layers of 512 before the output.
`gpt`  the character model of the standard runs, 7.2 M parameters, with AdamW.
`resnet9` that of the standard runs (`benchmarks/accuracy/standard_runs.py`), 1.6 M parameters.
`resnet50` of `keras.applications` on 32x32x3, 23.6 M parameters in 214 variables.

Reference: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
Recognition" (2015), configuration D; Zaremba et al., "Recurrent Neural Network Regularization"
(2014), medium model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import keras

VOCABULARY = 10_000
LSTM_STEPS = 35
ALPHABET = 65  # distinct characters of Shakespeare's plays
LEARNING_RATE = 0.01  # of plain SGD in step-time measurements
DATA_BATCHES = 4  # prepared before the measurement, then used in turn
COMPARED = ("mlp", "vgg", "resnet9")  # models that every peer can build with the same weights
PROBES = 4  # examples whose logits show whether two workers have equal weights
VGG16_FILTERS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
      name: key in `WORKLOADS`.
      batch_size: examples per worker and step, by default.
      build: makes the model; it returns logits.
      batch: (generator, batch size) -> (inputs, integer labels).
      inner: name of its optimizer; see `step_methods.optimizer_for`.
    """

    name: str
    batch_size: int
    build: Callable[[], keras.Model]
    batch: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    inner: str = "SGD"


def batches(
    workload: Workload, count: int, batch_size: int, seed: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns `count` batches of synthetic data; equal seeds give equal data."""
    generator = np.random.default_rng(seed)
    return [workload.batch(generator, batch_size) for _ in range(count)]


def initial_weights(
    shapes: Sequence[Sequence[int]], seed: int, ones: Sequence[bool] = ()
) -> list[np.ndarray]:
    """Returns Glorot-uniform kernels and zero biases, equal for equal shapes and seed.

    Args:
      shapes: of the weights as Keras stores them: kernels [..., in, out], biases [out].
      seed: of the generator.
      ones: which of the biases are 1: scales and variances of BatchNormalization.
    """
    generator, weights = np.random.default_rng(seed), []
    for position, shape in enumerate(shapes):
        if len(shape) == 1:
            weights.append(np.full(shape, position < len(ones) and ones[position], np.float32))
            continue
        field = math.prod(shape[:-2])  # of a convolution; 1 for a matrix
        limit = math.sqrt(6 / (field * (shape[-2] + shape[-1])))
        weights.append(generator.uniform(-limit, limit, shape).astype(np.float32))
    return weights


def set_initial_weights(model: keras.Model, seed: int) -> None:
    """Gives a Keras model the weights of `initial_weights`."""
    shapes = [weight.shape for weight in model.weights]
    ones = [weight.name in ("gamma", "moving_variance") for weight in model.weights]
    model.set_weights(initial_weights(shapes, seed, ones))


def probe_logits(
    model: str, logits: Callable[[np.ndarray], np.ndarray], seed: int
) -> list[list[float]]:
    """Returns a model's logits of a few examples; they are equal for equal weights."""
    examples = batches(WORKLOADS[model], 1, PROBES, seed)[0][0]
    return np.asarray(logits(examples), np.float64).tolist()


def _mlp() -> keras.Model:
    import keras

    hidden = [keras.layers.Dense(2048, activation="relu") for _ in range(6)]
    return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)], name="mlp")


def _mlp_batch(generator: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = generator.standard_normal((size, 784), dtype=np.float32)
    return inputs, generator.integers(0, 10, size, dtype=np.int32)


def _lstm() -> keras.Model:
    import keras

    return keras.Sequential(
        [
            keras.Input((LSTM_STEPS,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, 650),
            keras.layers.LSTM(650, return_sequences=True),
            keras.layers.LSTM(650, return_sequences=True),
            keras.layers.Dense(VOCABULARY),
        ],
        name="lstm",
    )


def _lstm_batch(generator: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    words = generator.integers(0, VOCABULARY, (size, LSTM_STEPS + 1), dtype=np.int32)
    return words[:, :-1], words[:, 1:]


def _charlm() -> keras.Model:
    from benchmarks.accuracy import data, networks

    return networks.transformer((data.CHARACTERS,), ALPHABET)


def _gpt() -> keras.Model:
    from benchmarks.accuracy import data, networks

    return networks.gpt((data.CHARACTERS,), ALPHABET)


def _charlm_batch(generator: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    from benchmarks.accuracy import data

    letters = generator.integers(0, ALPHABET, (size, data.CHARACTERS + 1), dtype=np.int32)
    return letters[:, :-1], letters[:, 1:]


def _vgg() -> keras.Model:
    import keras

    layers = [keras.Input((32, 32, 3))]
    for filters, repeats in VGG16_FILTERS:
        for _ in range(repeats):
            layers.append(keras.layers.Conv2D(filters, 3, padding="same", activation="relu"))
        layers.append(keras.layers.MaxPooling2D())
    layers.append(keras.layers.Flatten())
    layers.extend(keras.layers.Dense(512, activation="relu") for _ in range(2))
    return keras.Sequential([*layers, keras.layers.Dense(10)], name="vgg")


def _image_batch(generator: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = generator.standard_normal((size, 32, 32, 3), dtype=np.float32)
    return inputs, generator.integers(0, 10, size, dtype=np.int32)


def _resnet9() -> keras.Model:
    from benchmarks.accuracy import networks

    return networks.resnet9((32, 32, 3), 10)


def _resnet50() -> keras.Model:
    import keras

    return keras.applications.ResNet50(
        weights=None, input_shape=(32, 32, 3), classes=10, classifier_activation=None
    )


WORKLOADS = {
    "mlp": Workload("mlp", 16, _mlp, _mlp_batch),
    "lstm": Workload("lstm", 20, _lstm, _lstm_batch),
    "charlm": Workload("charlm", 8, _charlm, _charlm_batch),
    "gpt": Workload("gpt", 4, _gpt, _charlm_batch, "AdamW"),
    "vgg": Workload("vgg", 16, _vgg, _image_batch),
    "resnet9": Workload("resnet9", 32, _resnet9, _image_batch),
    "resnet50": Workload("resnet50", 16, _resnet50, _image_batch),
}


def main() -> None:
    """Prints a table of the workloads."""
    for workload in WORKLOADS.values():
        model = workload.build()
        parameters = model.count_params()
        tensors = len(model.trainable_variables)
        print(
            f"{workload.name:8} batch {workload.batch_size:3}  {tensors:3} variables"
            f"  {parameters:12,} parameters  {4 * parameters:13,} bytes"
        )


if __name__ == "__main__":
    main()
