"""What a worker of the exchange is: a replica, or a host with several replicas.

With two levels the gradients of a process's replicas, the *host's*, are summed on the first of its
devices, and the sum is what one worker has. So there is one selection, one residual and one message
a host; the totals go back to all of its replicas.
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
from tf_redsync.network import collectives, groups
from tf_redsync.ops.wire import widened
from tf_redsync.step import state_variables


class Replica:
    """This replica as a worker.

    Args:
        network: What carries its requests.

    Attributes:
        network: The same.
        replicas: Number of replicas that are this worker together: 1.
        meet: Brings those replicas together; `None` where there is one. See `Host.meet_replicas`.
    """

    replicas = 1
    meet: Callable[[Callable[..., Any], Sequence[tf.Tensor]], Any] | None = None

    def __init__(self, network: Network):
        self.network = network

    def variable(self, value: tf.Tensor, kind: str, name: str) -> Any:
        """Create a variable of which each worker has its own; see `step/state_variables.py`."""
        return state_variables.replica_variable(value, kind, name)


class Host(Replica):
    """All replicas of this process as a worker.

    Args:
        strategy: Their strategy.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        one_process = collectives.worker_count(strategy) == 1
        super().__init__(
            collectives.Alone() if one_process else collectives.HostCollectives(strategy)
        )
        self.replicas = collectives.local_replicas(strategy)
        self._strategy = strategy
        self._device = strategy.extended.worker_devices[0]
        self.meet = self.meet_replicas

    def meet_replicas(
        self, function: Callable[[list[tf.Tensor]], Any], tensors: Sequence[tf.Tensor]
    ) -> Any:
        """Call `function` once for all replicas, which must not be in a branch of their own.

        Args:
            function: Gets the sums of `tensors` over the replicas of this worker. It runs on the
                host's first device and in no replica context.
            tensors: This replica's.

        Returns:
            What `function` returns.
        """

        @tf.autograph.experimental.do_not_convert
        def met(strategy: Any, tensors: Any) -> Any:
            parts = [strategy.experimental_local_results(t) for t in tensors]
            with tf.device(self._device):
                return function([tf.add_n(widened(p)) for p in parts])

        return tf.distribute.get_replica_context().merge_call(met, args=(list(tensors),))

    @override
    def variable(self, value: tf.Tensor, kind: str, name: str) -> state_variables.HostVariable:
        with tf.device(self._device):
            return state_variables.HostVariable(value, kind, name, self.network, self._strategy)


def this_worker(strategy: tf.distribute.Strategy, two_levels: bool | None, direct: bool) -> Replica:
    """Return the worker that the calling replica is, or is a part of.

    Args:
        strategy: The strategy in whose scope the optimizer was built.
        two_levels: Whether a host is one worker. `None`: if there are several of them, with several
            replicas each, and direct collectives are allowed.
        direct: Allow the single-round collectives; `False` forces the public ones.

    Raises:
        ValueError: where two levels are wanted and direct collectives are not.
    """
    one_replica = collectives.local_replicas(strategy) == 1
    processes = collectives.worker_count(strategy)
    wanted = processes > 1 and direct if two_levels is None else two_levels
    if one_replica or not wanted:
        return Replica(collectives.for_strategy(strategy, direct))
    if processes > 1 and not direct:
        raise ValueError(
            "`two_levels` needs direct collectives between hosts. Received: two_levels=True, "
            "direct_collectives=False. Use direct_collectives=True."
        )
    return Host(strategy)


def check_together(strategy: tf.distribute.Strategy) -> None:
    """Check that the workers that TF_CONFIG names train together.

    Args:
        strategy: The strategy in whose scope the optimizer is built, or TensorFlow's default.

    Raises:
        ValueError: where this is one of several workers, but trains by itself.
    """
    named = _workers_in_tf_config()
    if named > 1 and collectives.worker_count(strategy) == 1:
        raise ValueError(
            f"TF_CONFIG names {named} workers, but this one would train by itself: "
            + (
                "a MultiWorkerMirroredStrategy exists, but the optimizer was not built in its "
                "scope. Build or load (`load_model`) and compile the model inside of `with "
                "strategy.scope():`, whatever data `fit` gets, and build an optimizer of a custom "
                "loop there."
                if groups.in_cluster()
                else "there is no MultiWorkerMirroredStrategy. Create one at the start of the "
                "program, `strategy = tf_redsync.MultiWorkerMirroredStrategy()`, and build or "
                "load (`load_model`) and compile the model inside of `with strategy.scope():`."
            )
            + " To predict alone, load it with `compile=False`."
            f" To train alone, unset TF_CONFIG. Received: strategy={type(strategy).__name__}."
        )


def check_in_scope(variables: Sequence[tf.Variable]) -> None:
    """Check that variables were made in the scope of the strategy, if it has several replicas.

    Raises:
        ValueError: for variables that were made before, or outside.
    """
    strategy = tf.distribute.get_strategy()
    outside = [v.name for v in variables if not isinstance(v, tf.distribute.DistributedValues)]
    if strategy.num_replicas_in_sync > 1 and outside:
        raise ValueError(
            f"the variables {', '.join(outside[:3])} were not made in the strategy's scope, so "
            f"every replica would train its own copy. Received: {len(outside)} such variables of "
            f"{len(variables)} under {type(strategy).__name__}. Build the model, too, inside of "
            "`with strategy.scope():`."
        )


def _workers_in_tf_config() -> int:
    """How many workers TF_CONFIG names, if this process is one of them and there are no others."""
    try:
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
        cluster, task = config["cluster"], config["task"]["type"]
        if "ps" in cluster or task not in ("chief", "worker"):
            return 0
        return sum(len(cluster.get(job, ())) for job in ("chief", "worker"))
    except (ValueError, KeyError, TypeError):  # whoever uses it says what is wrong with it
        return 0


def warn_if_alone(strategy: tf.distribute.Strategy, workers: int, two_levels: bool | None) -> None:
    """Warn if there is one worker."""
    if workers == 1:
        warnings.warn(
            "tf_redsync: there is one worker, so nothing is sent and nothing is compressed. "
            "Start several with `python -m tf_redsync.launch -n 2 script.py`, or with "
            "TF_CONFIG and tf_redsync.MultiWorkerMirroredStrategy (this strategy: "
            f"{type(strategy).__name__}, two_levels={two_levels}).",
            stacklevel=3,
        )
