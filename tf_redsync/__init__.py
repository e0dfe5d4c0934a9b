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

* `building`, `ops`: the native library; selection, quantization and decoding, native and in pure
  TensorFlow;
* `exchange`: the interface of methods and networks: requests, buckets, the driver, the loopback;
* `network`: collectives over `tf.distribute`; `cluster`: start-up, agreement and watchdog of the
  worker processes;
* `methods`, `contrib`: the algorithms, one file per family; `codings`: entropy-coded messages;
  `schedules`, `outer`: density schedules, outer optimizers;
* `policy`, `auto`: the method of each variable, set by the user or chosen by measurement;
* `step`: the exchange of one optimizer; `state`: snapshots and checkpoint files;
* `keras`: the wrappers, by optimizer family, and the hooks of `fit`;
* `optimizer`, `strategy`, `callbacks`, `addons`, `saving`, `flags`: the API; `metrics`: records of
  a run, and the report;
* `planning`: predictions without a cluster; `cli`: the command line.

Importing it loads TensorFlow and Keras and registers the optimizers, except on the command line.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from tf_redsync import requirements
from tf_redsync.version import __version__ as __version__

if TYPE_CHECKING:  # tests/unit/test_exports.py compares these with the public names
    from tf_redsync import addons as addons
    from tf_redsync import callbacks as callbacks
    from tf_redsync import codings as codings
    from tf_redsync import contrib as contrib
    from tf_redsync import methods as methods
    from tf_redsync import ops as ops
    from tf_redsync import outer as outer
    from tf_redsync.auto import Auto as Auto
    from tf_redsync.auto.bit_budget import BitBudget as BitBudget
    from tf_redsync.cli.notebook import notebook_launcher as notebook_launcher
    from tf_redsync.cluster.tf_config import rank as rank
    from tf_redsync.cluster.tf_config import size as size
    from tf_redsync.cluster.world import per_worker_batch as per_worker_batch
    from tf_redsync.cluster.world import world as world
    from tf_redsync.errors import DistributedError as DistributedError
    from tf_redsync.exchange.method import Method as Method
    from tf_redsync.keras.accuracy import AccuracyWarning as AccuracyWarning
    from tf_redsync.keras.amsgrad import AMSGrad as AMSGrad
    from tf_redsync.keras.muon import Muon as Muon
    from tf_redsync.methods.block_quantized import BlockQuantized as BlockQuantized
    from tf_redsync.methods.cd_sgd import CDSGD as CDSGD
    from tf_redsync.methods.coded import Coded as Coded
    from tf_redsync.methods.coded_adam import CodedAdam as CodedAdam
    from tf_redsync.methods.coded_topk import CodedTopK as CodedTopK
    from tf_redsync.methods.demo import DeMo as DeMo
    from tf_redsync.methods.dense import Dense as Dense
    from tf_redsync.methods.dense import NoExchange as NoExchange
    from tf_redsync.methods.dgc import DGC as DGC
    from tf_redsync.methods.gmc import GMC as GMC
    from tf_redsync.methods.gmc import CodedGMC as CodedGMC
    from tf_redsync.methods.half import HalfPrecision as HalfPrecision
    from tf_redsync.methods.local_sgd import DiLoCo as DiLoCo
    from tf_redsync.methods.local_sgd import LocalSGD as LocalSGD
    from tf_redsync.methods.low_rank import ACPSGD as ACPSGD
    from tf_redsync.methods.low_rank import PowerSGD as PowerSGD
    from tf_redsync.methods.quantized import QSGD as QSGD
    from tf_redsync.methods.quantized import TernGrad as TernGrad
    from tf_redsync.methods.random_sparse import RandomBlock as RandomBlock
    from tf_redsync.methods.random_sparse import RandomK as RandomK
    from tf_redsync.methods.redsync import RedSync as RedSync
    from tf_redsync.methods.sbc import SBC as SBC
    from tf_redsync.methods.scheduled import Scheduled as Scheduled
    from tf_redsync.methods.signs import EFSignSGD as EFSignSGD
    from tf_redsync.methods.signs import SignSGD as SignSGD
    from tf_redsync.methods.sparse_loco import SparseLoCo as SparseLoCo
    from tf_redsync.methods.streaming import StreamingDiLoCo as StreamingDiLoCo
    from tf_redsync.methods.topk import TopK as TopK
    from tf_redsync.metrics.page import report as report
    from tf_redsync.optimizer import DistributedOptimizer as DistributedOptimizer
    from tf_redsync.policy import Policy as Policy
    from tf_redsync.policy import Rule as Rule
    from tf_redsync.saving import read_worker_state as read_worker_state
    from tf_redsync.schedules import DenseWarmUp as DenseWarmUp
    from tf_redsync.schedules import DensityStages as DensityStages
    from tf_redsync.schedules import ExponentialWarmUp as ExponentialWarmUp
    from tf_redsync.strategy import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from tf_redsync.strategy import already_sharded as already_sharded

# Modules of the public names, except methods: those are registered by their modules in `methods`.
# All are loaded on first use, because the command line needs no TensorFlow.
_MODULES = {
    "addons": "tf_redsync.addons",
    "callbacks": "tf_redsync.callbacks",
    "codings": "tf_redsync.codings",
    "contrib": "tf_redsync.contrib",
    "methods": "tf_redsync.methods",
    "ops": "tf_redsync.ops",
    "outer": "tf_redsync.outer",
    "AMSGrad": "tf_redsync.keras.amsgrad",
    "AccuracyWarning": "tf_redsync.keras.accuracy",
    "Auto": "tf_redsync.auto",
    "BitBudget": "tf_redsync.auto.bit_budget",
    "already_sharded": "tf_redsync.strategy",
    "DistributedError": "tf_redsync.errors",
    "DistributedOptimizer": "tf_redsync.optimizer",
    "Method": "tf_redsync.exchange.method",
    "Muon": "tf_redsync.keras.muon",
    "Policy": "tf_redsync.policy",
    "Rule": "tf_redsync.policy",
    "DenseWarmUp": "tf_redsync.schedules",
    "DensityStages": "tf_redsync.schedules",
    "ExponentialWarmUp": "tf_redsync.schedules",
    "MultiWorkerMirroredStrategy": "tf_redsync.strategy",
    "notebook_launcher": "tf_redsync.cli.notebook",
    "per_worker_batch": "tf_redsync.cluster.world",
    "rank": "tf_redsync.cluster.tf_config",
    "read_worker_state": "tf_redsync.saving",
    "report": "tf_redsync.metrics.page",
    "size": "tf_redsync.cluster.tf_config",
    "world": "tf_redsync.cluster.world",
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name not in _MODULES and (name.startswith("_") or _is_module(name)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=None)
    _prepare()
    if name in _MODULES:
        module = importlib.import_module(_MODULES[name])
        value = module if _MODULES[name] == f"{__name__}.{name}" else getattr(module, name)
    else:
        value = _methods().get(name) or _refuse(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_MODULES, *_methods()})


def _is_module(name: str) -> bool:
    """Return whether a name is a submodule, whose attribute `import` looks up before loading it."""
    return importlib.util.find_spec(f"{__name__}.{name}") is not None


def _methods() -> dict[str, type]:
    return importlib.import_module("tf_redsync.methods.catalogue").methods_in("tf_redsync.methods")


def _refuse(name: str) -> NoReturn:
    """Raise `AttributeError` for an unknown name, with Horovod's or the closest known one."""
    more = importlib.import_module("tf_redsync.contrib").__all__
    folded = {n.lower(): f"rs.contrib.{n}" for n in more} | {n.lower(): n for n in __dir__()}
    close = difflib.get_close_matches(name.lower(), folded, 1)
    checks = importlib.import_module("tf_redsync.checks")
    hint = checks.horovod_hint(name) or (f"Did you mean {folded[close[0]]}?" if close else "")
    # With `obj`, Python would add a second suggestion to tracebacks.
    text = f"module {__name__!r} has no attribute {name!r}{hint and f'. {hint}'}"
    raise AttributeError(text, name=name, obj=None)


@functools.cache
def _prepare() -> None:
    """Check the installation, and register the optimizers for `keras.saving.load_model`."""
    requirements.check_backend(os.environ.get("KERAS_BACKEND") or "tensorflow")
    requirements.check_tensorflow()
    requirements.check_legacy_keras()
    requirements.check_keras()
    keras = importlib.import_module("keras")
    requirements.check_backend(keras.backend.backend())
    importlib.import_module("tf_redsync.autograph")
    importlib.import_module("tf_redsync.keras.keras3")
    importlib.import_module("tf_redsync.keras.amsgrad")
    importlib.import_module("tf_redsync.keras.muon")
    importlib.import_module("tf_redsync.keras").patch_tf_keras()


def _is_command_line(words: Sequence[str]) -> bool:
    """Return whether a process is `tf-redsync` or `python -m tf_redsync...`.

    Args:
        words: Its command line, the interpreter first.
    """
    others = {0, *(i + 1 for i, w in enumerate(words) if w in ("-W", "-X"))}  # have a value
    script = next((w for i, w in enumerate(words) if i not in others and w[:1] != "-"), "")
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    if module and script == module[0]:
        return module[0].partition(".")[0] == __name__
    return os.path.basename(script) == "tf-redsync"


requirements.check_system()
if not _is_command_line(sys.orig_argv):
    _prepare()
