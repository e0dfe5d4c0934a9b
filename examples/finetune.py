"""Fine-tunes a network of Keras Applications: first a new head alone, then the rest or LoRA.

    python -m tf_redsync launch -n 2 examples/finetune.py
    ... --lora=4 --run_dir=runs/lora
    ... --weights=imagenet --data_dir=flowers --run_dir=runs/flowers

--data_dir is a folder with a folder of images for each class. Without it, nothing is downloaded:
the network first learns some classes of the data at hand, and is then fine-tuned for the others.
Started again, it goes on from its last checkpoint: give each --weights and --data_dir a --run_dir.
"""

import os
import zlib

import datasets
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tf_redsync as rs
import tf_redsync.flags

FLAGS = flags.FLAGS
tf_redsync.flags.define(exchange="CodedTopK(density=0.03, value_bits=4)", run_dir="runs/finetune")
flags.DEFINE_string("data_dir", None, "Folder with a folder of images for each class.")
flags.DEFINE_string(
    "weights",
    "none",
    "Of the backbone: 'imagenet', which Keras downloads; a .weights.h5 file; or 'none', which "
    "trains it first, on digits 0 to 4, to be fine-tuned for 5 to 9.",
)
flags.DEFINE_float("alpha", 0.25, "Width of MobileNet; ImageNet's are 0.25, 0.5, 0.75 and 1.")
flags.DEFINE_integer("image_size", 32, "Pixels of a side, 32 or more; ImageNet's are 224.")
flags.DEFINE_integer("lora", 0, "Rank; the backbone then stays frozen, but for LoRA's matrices.")
flags.DEFINE_integer("head_epochs", 12, "Of the head alone.")
flags.DEFINE_integer("epochs", 12, "Of the other phases; 0 leaves them out.")
flags.DEFINE_integer("batch_size", 16, "Examples per worker and step.")
flags.DEFINE_float("learning_rate", 0.003, "Of Adam; a tenth of it once the backbone is trained.")
flags.DEFINE_integer("seed", 1, "Of the weights and the order of the examples.")


def enlarged_digits(first: int, last: int):
    """Returns training and test set of scikit-learn's digits `first` to `last`, in colours."""
    found = []
    for images, labels in datasets.digits():
        chosen = (labels >= first) & (labels <= last)
        nearest = np.arange(FLAGS.image_size) * images.shape[1] // FLAGS.image_size
        images = 255.0 * images[chosen][:, nearest][:, :, nearest].repeat(3, 3)
        found.append(tf.data.Dataset.from_tensor_slices((images, labels[chosen] - first)))
    return found


def load_data():
    """Returns training and test set, each without batches, and the number of classes."""
    if FLAGS.data_dir:
        train, test = keras.utils.image_dataset_from_directory(
            FLAGS.data_dir,
            image_size=(FLAGS.image_size, FLAGS.image_size),
            batch_size=None,
            validation_split=0.2,
            subset="both",
            seed=FLAGS.seed,
        )
        return train, test, len(train.class_names)
    return *enlarged_digits(5, 9), 5


def build_model(backbone, classes: int) -> keras.Model:
    """A new head on a backbone."""
    inputs = keras.Input([FLAGS.image_size, FLAGS.image_size, 3])
    scaled = keras.layers.Rescaling(1 / 127.5, offset=-1.0)(inputs)  # as MobileNet wants it
    outputs = keras.layers.Dense(classes)(keras.layers.GlobalAveragePooling2D()(backbone(scaled)))
    return keras.Model(inputs, outputs)


def thaw(backbone) -> None:
    """Lets the backbone learn, or LoRA's matrices in it. BatchNormalization stays as it is."""
    kernels = (keras.layers.Conv2D, keras.layers.Dense, keras.layers.EinsumDense)
    backbone.trainable = True  # before LoRA, since it would thaw the kernels
    for layer in backbone.layers:
        if FLAGS.lora:
            layer.trainable = isinstance(layer, kernels)
            if layer.trainable:
                layer.enable_lora(FLAGS.lora)
        else:
            layer.trainable = not isinstance(layer, keras.layers.BatchNormalization)


def checksum(variables) -> str:
    """Equal for equal weights."""
    value = 0
    for variable in variables:
        value = zlib.crc32(variable.numpy().tobytes(), value)
    return f"{value:08x}"


def train_phase(strategy, model, name: str, epochs: int, rate: float, train, test) -> None:
    """Compiles and trains: whenever other variables are trained, that takes a new optimizer."""
    if not epochs:
        return
    rank = rs.rank()
    batch = FLAGS.batch_size * strategy.num_replicas_in_sync  # of all workers
    with strategy.scope():
        # Without beta_1: gradients that wait in the residual take the place of Adam's momentum.
        inner = keras.optimizers.Adam(rate, beta_1=0.0)
        optimizer = rs.DistributedOptimizer(inner, **tf_redsync.flags.exchange())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    trained = sum(tf.size(v).numpy() for v in model.trainable_variables)
    if rank == 0:
        print(f"== {name}: {trained:,} of {model.count_params():,} weights learn", flush=True)
    frozen = checksum(model.non_trainable_variables)
    run_dir = os.path.join(FLAGS.run_dir, name)
    model.fit(
        train.shuffle(2000, seed=FLAGS.seed).batch(batch, drop_remainder=True),
        epochs=epochs,
        validation_data=test.batch(batch),
        callbacks=[
            rs.callbacks.Checkpoint(os.path.join(run_dir, "checkpoints")),
            rs.callbacks.CompressionMetrics(run_dir),
        ],
        shuffle=False,  # the dataset does
        verbose=2 if rank == 0 else 0,
    )
    print(
        f"worker {rank}, {name}: checksum of frozen weights {frozen} before, "
        f"{checksum(model.non_trainable_variables)} after, of all {checksum(model.variables)}",
        flush=True,
    )


def main(argv):
    """Trains on the workers of TF_CONFIG; alone without one."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    if FLAGS.data_dir and FLAGS.weights == "none":
        raise app.UsageError("--data_dir needs --weights=imagenet, or a .weights.h5 file.")
    strategy = rs.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(FLAGS.seed)
    weights = None if FLAGS.weights == "none" else FLAGS.weights
    shape = [FLAGS.image_size, FLAGS.image_size, 3]
    if weights == "imagenet":
        with datasets.one_at_a_time():  # one worker downloads, and the others find the file
            keras.applications.MobileNet(shape, FLAGS.alpha, include_top=False, weights=weights)
    with strategy.scope():
        backbone = keras.applications.MobileNet(
            shape, FLAGS.alpha, include_top=False, weights=weights
        )
    if weights is None:
        if rs.rank() == 0:
            print(
                "No weights are loaded (--weights=none): the backbone learns digits 0 to 4 first.",
                flush=True,
            )
        for layer in backbone.layers:
            layer.momentum = 0.9  # of BatchNormalization: its statistics have few steps to settle
        train, test = enlarged_digits(0, 4)
        with strategy.scope():
            model = build_model(backbone, classes=5)
        train_phase(strategy, model, "backbone", FLAGS.epochs, FLAGS.learning_rate, train, test)

    train, test, classes = load_data()
    backbone.trainable = False
    with strategy.scope():
        model = build_model(backbone, classes)
    train_phase(strategy, model, "head", FLAGS.head_epochs, FLAGS.learning_rate, train, test)
    with strategy.scope():
        thaw(backbone)
    name = "lora" if FLAGS.lora else "whole"
    train_phase(strategy, model, name, FLAGS.epochs, FLAGS.learning_rate / 10, train, test)


if __name__ == "__main__":
    app.run(main)
