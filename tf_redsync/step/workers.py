"""Workers of the exchange: a worker is a replica, or a host with several replicas.

With two levels, the gradients of all replicas of a process (a *host*) are summed on its first
device, and the host is one worker. Each host then has one selection, one residual and one message;
all its replicas receive the totals.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tf_redsync.exchange.driver import Network
from tf_redsync.network import collectives, groups, strategies
from tf_redsync.ops.wire import widened
from tf_redsync.step import state_variables


class Worker:
    """A worker that consists of one replica.

    Args:
        network: The network that answers its requests.

    Attributes:
        network: As given.
        replicas: Number of replicas that form this worker.
    """

    replicas = 1

    def __init__(self, network: Network):
        self.network = network

    def with_sums(
        self, function: Callable[[list[tf.Tensor]], Any], tensors: Sequence[tf.Tensor]
    ) -> Any:
        """Call `function` once for this worker, with the sums of `tensors` over its replicas.

        A worker of one replica calls it in a replica context, a host in a cross-replica context.

        Args:
            function: Receives the sums.
            tensors: The tensors of this replica.

        Returns:
            The result of `function`.
        """
        return function(list(tensors))

    def variable(self, value: tf.Tensor, kind: str, name: str) -> Any:
        """Create a per-worker variable; see `step/state_variables.py`."""
        return state_variables.replica_variable(value, kind, name)


class HostWorker(Worker):
    """A worker that consists of all replicas of this process.

    Args:
        strategy: The strategy of the replicas.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        one_process = strategies.process_count(strategy) == 1
        super().__init__(
            collectives.Alone() if one_process else collectives.HostCollectives(strategy)
        )
        self.replicas = strategies.local_replicas(strategy)
        self._device = strategy.extended.worker_devices[0]

    @override
    def with_sums(
        self, function: Callable[[list[tf.Tensor]], Any], tensors: Sequence[tf.Tensor]
    ) -> Any:
        def merged(strategy: Any, tensors: Any) -> Any:
            parts = [strategy.experimental_local_results(t) for t in tensors]
            with tf.device(self._device):
                return function([tf.add_n(widened(p)) for p in parts])

        return tf.distribute.get_replica_context().merge_call(merged, args=(list(tensors),))

    @override
    def variable(self, value: tf.Tensor, kind: str, name: str) -> tf.Variable:
        with tf.device(self._device):
            return collectives.OneDeviceVariable(value, trainable=False, name=name)


def this_worker(strategy: tf.distribute.Strategy, two_levels: bool | None, direct: bool) -> Worker:
    """Return the worker that the calling replica belongs to.

    Args:
        strategy: The strategy in whose scope the optimizer was built.
        two_levels: Whether a host is one worker. `None`: true for several hosts with several
            replicas each, if direct collectives are allowed.
        direct: Allow single-round collectives; `False` forces the public ones.

    Raises:
        ValueError: If two levels are requested without direct collectives.
    """
    one_replica = strategies.local_replicas(strategy) == 1
    processes = strategies.process_count(strategy)
    wanted = processes > 1 and direct if two_levels is None else two_levels
    if one_replica or not wanted:
        return Worker(collectives.for_strategy(strategy, direct))
    if processes > 1 and not direct:
        raise ValueError(
            "`two_levels` needs direct collectives between hosts. Received: two_levels=True, "
            "direct_collectives=False. Use direct_collectives=True."
        )
    return HostWorker(strategy)


def check_together(strategy: tf.distribute.Strategy) -> None:
    """Check that this worker trains together with the other workers in TF_CONFIG.

    Args:
        strategy: The strategy in whose scope the optimizer is built, or TensorFlow's default.

    Raises:
        ValueError: If TF_CONFIG names several workers, but this one would train alone.
    """
    named = _workers_in_tf_config()
    if named > 1 and strategies.process_count(strategy) == 1:
        raise ValueError(
            f"TF_CONFIG names {named} workers, but this worker would train alone: "
            + (
                "a MultiWorkerMirroredStrategy exists, but the optimizer was not built in its "
                "scope. Build or load (`load_model`) and compile the model inside `with "
                "strategy.scope():`, for any kind of data. In a custom loop, build the optimizer "
                "there."
                if groups.in_cluster()
                else "there is no MultiWorkerMirroredStrategy. Create one at the start of the "
                "program, `strategy = tf_redsync.MultiWorkerMirroredStrategy()`, and build or "
                "load (`load_model`) and compile the model inside `with strategy.scope():`."
            )
            + " To predict alone, load the model with `compile=False`."
            f" To train alone, unset TF_CONFIG. Received: strategy={type(strategy).__name__}."
        )


def check_in_scope(variables: Sequence[tf.Variable]) -> None:
    """Check that variables were created in the strategy's scope, if it has several replicas.

    Raises:
        ValueError: If variables were created outside of the scope, or the strategy is unsupported.
    """
    strategy = tf.distribute.get_strategy()
    strategies.check_supported(strategy)
    outside = [v.name for v in variables if not isinstance(v, tf.distribute.DistributedValues)]
    if strategy.num_replicas_in_sync > 1 and outside:
        raise ValueError(
            f"the variables {', '.join(outside[:3])} were not created in the strategy's scope, so "
            f"every replica would train its own copy. Received: {len(outside)} such variables of "
            f"{len(variables)} under {type(strategy).__name__}. Build the model inside `with "
            "strategy.scope():`, too."
        )


def _workers_in_tf_config() -> int:
    """Return the number of workers in TF_CONFIG, or 0 for parameter servers and other tasks."""
    try:
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
        cluster, task = config["cluster"], config["task"]["type"]
        if "ps" in cluster or task not in ("chief", "worker"):
            return 0
        return sum(len(cluster.get(job, ())) for job in ("chief", "worker"))
    except (ValueError, KeyError, TypeError):  # the strategy reports a malformed TF_CONFIG
        return 0


# Numbers of processes, as set by Open MPI, MPICH, torchrun and srun. SLURM_NTASKS is missing,
# because the only process of a batch script may have it.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def _of_another_launcher() -> str:
    """Return a sentence about the processes that another launcher has started, or ""."""
    sizes = {name: os.environ.get(name, "") for name in _SIZES}
    several = next((n for n, size in sizes.items() if size.isdecimal() and int(size) > 1), None)
    if several is None or os.environ.get("TF_CONFIG"):
        return ""
    return (
        f" {several}={sizes[several]}, but without TF_CONFIG each of these processes trains its "
        f"own model. Start them with `tf-redsync launch -n {sizes[several]} script.py`, on several "
        "machines with `--hosts`, or `srun --ntasks-per-node=1 tf-redsync launch --slurm script.py`"
        " (docs/launching.md)."
    )


def warn_alone(strategy: tf.distribute.Strategy, worker: Worker) -> None:
    """Warn that there is one worker, so that nothing is sent or compressed.

    Args:
        strategy: The strategy in whose scope the optimizer was built.
        worker: This worker.
    """
    warnings.warn(
        "tf_redsync: there is one worker, so gradients are neither sent nor compressed. Start "
        "several with `python -m tf_redsync.launch -n 2 script.py`, or with TF_CONFIG and "
        "tf_redsync.MultiWorkerMirroredStrategy (this strategy: "
        f"{type(strategy).__name__}, two_levels={isinstance(worker, HostWorker)})."
        f"{_of_another_launcher()}",
        stacklevel=3,
    )
