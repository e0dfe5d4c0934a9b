"""tf_redsync: gradient compression for Keras training on several workers.

    strategy = tf_redsync.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=tf_redsync.DistributedOptimizer(
                keras.optimizers.SGD(0.1), tf_redsync.RedSync(density=0.001, momentum=0.9)
            ),
            loss=...,
        )
    model.fit(dataset)

Map of the package, bottom up:

* `ops`: selection and decoding, native and in pure TensorFlow;
* `exchange`: requests, buckets, wire format, collectives, state, the loopback;
* `methods`, `feedback`, `schedules`: the algorithms, one file a family;
* `policy`, `programs`: which variable by which method, and when;
* `keras`, `optimizer`, `strategy`, `addons`: what users touch;
* `launch`, `doctor`: command line.
"""

from tf_redsync import addons, methods, ops
from tf_redsync.methods import Dense, Method, NoExchange, RedSync
from tf_redsync.optimizer import DistributedOptimizer
from tf_redsync.policy import Policy, Rule
from tf_redsync.schedules import DenseWarmUp, ExponentialWarmUp
from tf_redsync.strategy import MultiWorkerMirroredStrategy

__version__ = "0.1.0"

__all__ = [
    "Dense",
    "DenseWarmUp",
    "DistributedOptimizer",
    "ExponentialWarmUp",
    "Method",
    "MultiWorkerMirroredStrategy",
    "NoExchange",
    "Policy",
    "RedSync",
    "Rule",
    "addons",
    "methods",
    "ops",
]
