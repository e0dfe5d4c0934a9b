r"""Trains ResNet-20 or VGG-16 on CIFAR-10, with augmentation and a cosine schedule.

    python -m tf_redsync launch -n 2 examples/cifar10.py               # minutes, data at hand
    ... --data_dir=cifar-10-batches-py --run_dir=runs/resnet20
    ... --model=vgg16 --exchange="RedSync(momentum=0.9), warm_up=DenseWarmUp(fraction=0.05)" \
        --run_dir=runs/vgg16

Without --data_dir it trains on scikit-learn's digits in colours. Started again, it goes on from its
last checkpoint.
"""

import os

import datasets
import keras
import tensorflow as tf
from absl import app, flags
from keras import layers

import tf_redsync as rs
import tf_redsync.flags

FLAGS = flags.FLAGS
tf_redsync.flags.define(exchange="CodedGMC(momentum=0.9)", run_dir="runs/cifar10")
flags.DEFINE_enum("model", "resnet20", ["resnet20", "vgg16"], "The network.")
flags.DEFINE_string("data_dir", None, "Folder cifar-10-batches-py, or cifar-10-python.tar.gz.")
flags.DEFINE_integer("epochs", 12, "Passes over the training set, in all.")
flags.DEFINE_integer("batch_size", 16, "Examples per worker and step.")
flags.DEFINE_float("learning_rate", 0.05, "Of SGD at the start, for all workers together.")
flags.DEFINE_float("weight_decay", 1e-4, "L2 penalty of the kernels.")
flags.DEFINE_integer("seed", 1, "Of the weights, the order and the augmentation.")


def resnet20(penalty):
    """He, Zhang, Ren, Sun (2016), "Deep Residual Learning", section 4.2, n = 3."""

    def convolution(x, width, stride=1, size=3):
        options = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal"}
        x = layers.Conv2D(width, size, stride, kernel_regularizer=penalty, **options)(x)
        return layers.BatchNormalization()(x)

    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(convolution(inputs, 16))
    for width in (16, 32, 64):
        for block in range(3):
            stride = 2 if width > 16 and block == 0 else 1
            y = layers.ReLU()(convolution(x, width, stride))
            shortcut = convolution(x, width, stride, size=1) if stride > 1 else x
            x = layers.ReLU()(convolution(y, width) + shortcut)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10)(x), name="resnet20")


def vgg16(penalty):
    """Simonyan, Zisserman (2015), configuration D, for small images: one dense layer."""
    model = keras.Sequential([keras.Input((32, 32, 3))], name="vgg16")
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            options = {"padding": "same", "use_bias": False, "kernel_regularizer": penalty}
            model.add(layers.Conv2D(width, 3, **options))
            model.add(layers.BatchNormalization())
            model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(10))
    return model


def normalized(image, label):
    """An image of values near 0, float32."""
    return tf.cast(image, tf.float32) / 64.0 - 2.0, label


def augmented(image, label):
    """Shifted by up to four pixels, and in half of the cases mirrored, if that is CIFAR-10."""
    image = tf.image.random_crop(tf.pad(image, [[4, 4], [4, 4], [0, 0]]), [32, 32, 3])
    if FLAGS.data_dir:  # a mirrored digit is none
        image = tf.image.random_flip_left_right(image)
    return normalized(image, label)


def main(argv):
    """Trains on the workers of TF_CONFIG; alone without one."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    strategy = rs.MultiWorkerMirroredStrategy()
    first = rs.rank() == 0
    keras.utils.set_random_seed(FLAGS.seed)
    (x, y), test = datasets.cifar10(FLAGS.data_dir)
    batch = FLAGS.batch_size * strategy.num_replicas_in_sync
    train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=FLAGS.seed)
    train = train.map(augmented, tf.data.AUTOTUNE).batch(batch, drop_remainder=True)
    test = tf.data.Dataset.from_tensor_slices(test).map(normalized).batch(batch)

    with strategy.scope():
        penalty = keras.regularizers.L2(FLAGS.weight_decay)
        model = {"resnet20": resnet20, "vgg16": vgg16}[FLAGS.model](penalty)
        steps = FLAGS.epochs * (len(x) // batch)
        rate = keras.optimizers.schedules.CosineDecay(FLAGS.learning_rate, max(1, steps))
        optimizer = rs.DistributedOptimizer(
            keras.optimizers.SGD(rate), **tf_redsync.flags.exchange()
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(
        train,
        epochs=FLAGS.epochs,
        validation_data=test,
        callbacks=[
            rs.callbacks.Checkpoint(os.path.join(FLAGS.run_dir, "checkpoints")),
            rs.callbacks.CompressionMetrics(FLAGS.run_dir),
        ],
        shuffle=False,  # the dataset does
        verbose=2 if first else 0,
    )
    _, accuracy = model.evaluate(test, verbose=0)
    if first:
        print(f"{FLAGS.model}: test accuracy {accuracy:.4f}", flush=True)
        model.save(os.path.join(FLAGS.run_dir, f"{FLAGS.model}.keras"))


if __name__ == "__main__":
    app.run(main)
