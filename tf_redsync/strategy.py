"""`MultiWorkerMirroredStrategy` with support for Keras 3.

Additions to TensorFlow's strategy:

* `reduce` accepts the structures and scalars that `model.fit` of Keras 3 passes, and numbers of
  every dtype. `gather` concatenates by rank and accepts strings.
* BatchNormalization's moving statistics, which every worker updates from its own batches, are
  averaged over the workers. This takes a small collective after every step that changed them.
* Workers that build different models raise an error with both shapes instead of a deadlock.
* TF_CONFIG is checked before any server starts. Later strategies of a process share the server.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_redsync import autograph, checks
from tf_redsync.cluster import (
    agreement,
    coordination,
    device_iterators,
    rendezvous,
    step_counters,
    step_errors,
    watchdog,
)
from tf_redsync.cluster.tf_config import Cluster, check_tf_config
from tf_redsync.keras import (
    batch_logs,
    compile_hook,
    data_amounts,
    first_batch,
    fit_hook,
    known_batches,
    patch_tf_keras,
    python_numbers,
    replica_seeds,
    scalar_losses,
    statistics,
)
from tf_redsync.network import (
    collectives,
    dtypes,
    groups,
    initial_values,
    strategies,
    transport,
)
from tf_redsync.ops import native

fit_hook.install(keras.callbacks)
first_batch.install(keras.Model)
compile_hook.install(keras.Model)
batch_logs.install(keras.Model)
scalar_losses.install()
replica_seeds.install()
python_numbers.install()
device_iterators.install()

_NUMBERS = (int, float, np.generic, np.ndarray)


@contextmanager
def _explaining_earlier_use() -> Iterator[None]:
    """Context that adds the remedy to TensorFlow's error about ops before the strategy.

    Raises:
        RuntimeError: TensorFlow has created a tensor or variable before the strategy.
    """
    try:
        yield
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise RuntimeError(
            f"{error}. TensorFlow has been used before the strategy was created, for a tensor, a "
            "variable, a dataset or a model, perhaps one that a function of `notebook_launcher` "
            "refers to. Create `strategy = tf_redsync.MultiWorkerMirroredStrategy()` first in the "
            "program."
        ) from error


def _resolver() -> Any:
    """Check TF_CONFIG and return its cluster resolver."""
    check_tf_config(os.environ.get("TF_CONFIG"), serves=coordination.joined())
    if not os.environ.get("TF_CONFIG"):  # TensorFlow would parse an empty one
        os.environ.pop("TF_CONFIG", None)
    return tf.distribute.cluster_resolver.TFConfigClusterResolver()


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Synchronous training on several workers, with `model.fit` of Keras 3.

    The strategy reads the cluster from TF_CONFIG. Create it at the start of the program, before any
    other TensorFlow operation. A later strategy in the same process, for example in a notebook cell
    that runs again, shares the running cluster. Its `timeout_seconds` then applies to all
    strategies of the process.

    Args:
        cluster_resolver: As in TensorFlow's strategy; default TF_CONFIG.
        timeout_seconds: Seconds that a worker may be behind another one that has entered a step.
            After this time, all workers raise an error with the step of each worker. `None`: no
            limit. Default: 600.
        communication_options: As in TensorFlow's strategy, but without `timeout_seconds`. Without
            an `implementation`, NCCL is used if every worker has GPUs that it does not share.
        start_timeout: Seconds that the constructor waits for the other workers. It logs the missing
            workers meanwhile and finally raises an error that names them. May be `float("inf")`.
            Default: the environment variable `TF_REDSYNC_START_TIMEOUT`, else 600.
        heartbeat_seconds: Seconds without a heartbeat after which TensorFlow ends training, above
            10. Unless `timeout_seconds=None`, the watchdog ends it after half of this time (default
            30 s), and names the silent worker. Connections may be interrupted for a quarter of this
            time. Default: the environment variable `TF_REDSYNC_HEARTBEAT_SECONDS`, else
            `timeout_seconds + 30`, at most 60; no limit with `timeout_seconds=None`.

    Raises:
        ValueError: TF_CONFIG is malformed, or a port is in use. A timeout is out of range or is set
            in `communication_options`. NCCL lacks GPUs, or the workers' numbers of GPUs differ.
        RuntimeError: TensorFlow was used before the strategy was created.
        StartError: a worker did not start in time, or this process is a duplicate.

    Example:
        strategy = tf_redsync.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = build_model()
    """

    reduces_locally = False  # see `first_batch.py`

    def __init__(
        self,
        cluster_resolver: Any = None,
        *,
        timeout_seconds: float | None = watchdog.DEFAULT_TIMEOUT_SECONDS,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        start_timeout: float | None = None,
        heartbeat_seconds: float | None = None,
    ) -> None:
        _check_timeout(timeout_seconds)
        _check_communication_options(communication_options)
        heartbeat_seconds = watchdog.heartbeat(heartbeat_seconds)
        if cluster_resolver is None:
            cluster_resolver = _resolver()
        lost_after = watchdog.lost_after(timeout_seconds, heartbeat_seconds)
        native.backend()  # may build the native library, so it runs before others wait for us
        cluster = Cluster.of(cluster_resolver)
        startup = rendezvous.startup(None if coordination.joined() else cluster, start_timeout)
        options = transport.copied(communication_options)
        number = collectives.reserve_group_keys(self)
        times = f"timeout_seconds={timeout_seconds}, heartbeat_seconds={heartbeat_seconds}"
        with startup as seconds, coordination.time_limits(cluster, lost_after, seconds, times):
            with _explaining_earlier_use():
                super().__init__(cluster_resolver, options)
        if strategies.process_count(self) > 1:
            self._start_together(number, options, timeout_seconds, heartbeat_seconds)
        self._eager_assignments = statistics.EagerAssignments()
        self._begun: list[statistics.Before] = []  # one for each replica's running step
        # Lifted functions by the `tf.function` that was passed to `run`; see `_on_every_replica`.
        self._functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._network = collectives.for_strategy(self)  # averages the statistics
        # Non-trainable model variables by number, in the order of creation, see `run`. Garbage
        # collection removes those of old models, at different times on each worker.
        self._statistics: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._created = 0  # the number of the next statistic
        self._collected = 0  # their number at the last trace that created some
        # The function of `average_statistics`, and the numbers of the statistics that it averages.
        self._averages: tuple[Callable[[], Any], list[int]] = (lambda: None, [])
        self._reset_step()
        groups.gather_by_rank(self)

    def _start_together(
        self, number: int, options: Any, timeout: float | None, heartbeat: float | None
    ) -> None:
        collectives.keep_instance_keys(self)
        initial_values.install(self, functools.partial(agreement.gather_texts, self))
        watchdog.start(self, timeout, heartbeat)
        step_errors.install()
        self.batch_rows = {name: data_amounts.BatchRows() for name in ("fit", "evaluate")}
        self.batch_logs = batch_logs.BatchLogs()
        self.known_batches = known_batches.KnownBatches()
        times = f"timeout_seconds={timeout}, heartbeat_seconds={heartbeat}"
        which = "the strategy" if number == 1 else f"strategy {number} of the process"
        start = f"start with {which}'s {times}, {transport.described(options)}"
        gpus = transport.as_text(transport.own_gpus())
        transport.choose(options, agreement.gather_texts(self, start, gpus))

    def _reset_step(self) -> None:
        """Reset the attributes that are set while a step is traced."""
        # By counter, a skip condition and whether workers agree on it.
        self.skip_conditions: dict[Any, tuple[Callable[[], tf.Tensor], bool]] = {}
        self.comparisons: dict[Any, Callable[[], None]] = {}  # after the step
        # Whether to average the statistics in the step; `None`: in every step.
        self.statistics_due: Callable[[], tf.Tensor] | None = None
        # Those that the step uses, an eager one assigns; equal on all workers.
        self.used_statistics: list[Any] = []

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Reduce `value` over replicas; accepts structures, and scalars with `axis=0`.

        Args:
            reduce_op: `"SUM"`, `"MEAN"` or a `tf.distribute.ReduceOp`.
            value: A tensor, a per-replica value, a number, an array, a Keras variable, or a
                structure of them. The mean of integers of any size is float64.
            axis: Axis to reduce within each replica, or `None`. Ignored for scalars.

        Returns:
            The structure of `value` with the reduced tensors.

        Raises:
            TypeError: `value` has strings, bools, complex numbers, ragged or sparse tensors.
            tf.errors.InvalidArgumentError: a sum of integers overflows its dtype. Sums of int32,
                int64 and uint64 wrap around instead.
        """
        mean = str(getattr(reduce_op, "name", reduce_op)).upper() == "MEAN"

        def reduce_one(item: Any) -> Any:
            if isinstance(item, (*_NUMBERS, keras.Variable)):
                item = tf.convert_to_tensor(item)  # equal on the replicas of this process
            parts = self.experimental_local_results(item)
            if self.reduces_locally or item is None:
                return parts[0]
            scalar = all(getattr(p, "shape", None) is not None and p.shape.rank == 0 for p in parts)
            along = None if scalar else axis
            reduce = super(MultiWorkerMirroredStrategy, self).reduce

            def over_replicas(value: Any) -> Any:
                total = reduce(reduce_op, value, along)
                # TensorFlow returns the integers of a single replica instead of their mean.
                integers = mean and getattr(getattr(total, "dtype", None), "is_integer", False)
                return tf.cast(total, tf.float64) if integers else total

            return dtypes.summed(over_replicas, self._on_replicas, item, parts[0])

        def reduced() -> Any:
            if not self.reduces_locally:
                self._agree_on("reduce", value, f"by {getattr(reduce_op, 'name', reduce_op)}")
            with step_errors.translated():
                return tf.nest.map_structure(reduce_one, value)

        if batch_logs.is_mean(value, reduce_op):
            return value
        if not self.reduces_locally and step_counters.is_request(value, axis):
            step_counters.note_request(value)
            if hasattr(self, "known_batches"):
                eager = tf.executing_eagerly()
                ask = (lambda: self._requested(value)) if eager else reduced
                return self.known_batches.with_batch(value, ask)
        return reduced()

    def _requested(self, own: tf.Tensor) -> tf.Tensor:
        """Return the sum of `own`, one eager int64, over the workers, without a collective.

        TensorFlow never frees the key of an eager collective, and a loop requests every batch.
        """
        method = fit_hook.running_method()
        action = f"request a batch in `{method}`" if method else "request a batch"
        texts = agreement.gather_texts(self, action, str(int(tf.reduce_sum(own))))
        return tf.fill(own.shape, tf.constant(sum(map(int, texts)), tf.int64))

    def gather(self, value: Any, axis: Any) -> Any:
        """Concatenate `value` of all replicas along `axis`, by rank; accepts strings and bools.

        Args:
            value: A tensor, an array or a per-replica value, of any dtype.
            axis: Axis along which to concatenate.

        Raises:
            ValueError: `value` is a scalar.
            Disagreement: on all workers, if eager calls differ between workers.
        """
        if isinstance(value, _NUMBERS):
            value = tf.convert_to_tensor(value)
        gather, part = super().gather, self.experimental_local_results(value)[0]
        if getattr(getattr(part, "shape", None), "rank", None) == 0:
            raise ValueError(
                f"`value` must have an axis to concatenate. Received: value={part!r}. Pass "
                "`tf.reshape(value, [1])`."
            )
        self._agree_on("gather", value, f"along axis {axis}")
        with step_errors.translated():
            return dtypes.gathered(lambda v: gather(v, axis), self._on_replicas, value, part)

    def _on_replicas(self, function: Callable[..., Any], value: Any) -> Any:
        return super().run(function, args=(value,))

    def _agree_on(self, action: str, value: Any, detail: str) -> None:
        """Check before an eager collective that all workers run the same collective."""
        if not tf.executing_eagerly():
            return
        parts = tf.nest.flatten(value)
        names = [p.name if isinstance(p, tf.Variable) else _dtype_name(p) for p in parts]
        method = fit_hook.running_method()
        where = f" in `{method}`" if method else ""
        agreement.agree(self, f"{action} {', '.join(names)} {detail}{where}")

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Run `fn` on every replica, then average the moving statistics that it changed.

        The arguments are those of TensorFlow's strategy. With several workers, steps that are
        skipped restore the statistics.
        """
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            return self._on_every_replica(fn)(*args, **(kwargs or {}))

        method = fit_hook.running_method()
        model = batch_logs.trained_by(fn) if method == "fit" else None

        def run_and_average(*fn_args: Any, **fn_kwargs: Any) -> Any:
            self._reset_step()
            if method in self.batch_rows:
                self.batch_rows[method].note((fn_args, fn_kwargs))
            before = statistics.Before(self._statistics.values())
            with self._recording_new_statistics(before):
                result, used, changed = self._observed(lambda: fn(*fn_args, **fn_kwargs))
            self._restore_or_average(changed, before)
            if model is not None:
                result = self._averaged_logs(model, result)
            self.used_statistics = used
            for check in list(self.comparisons.values()):
                check()
            return result

        if strategies.process_count(self) == 1:
            self.skip_conditions = {}  # nothing is restored
            return super().run(fn, args, kwargs, options)
        if self._created > self._collected and not tf.executing_eagerly():
            if self._collected:  # the graph would keep the statistics of discarded models
                gc.collect()
            self._collected = self._created
        fn = autograph.as_called(fn)
        step_counters.enter_step((args, kwargs))
        try:
            with step_errors.translated():  # for eager steps; `tf.function` translates its own
                return super().run(run_and_average, args, kwargs, options)
        finally:
            self._reset_step()  # they refer to the model

    def _observed(self, step: Callable[[], Any]) -> tuple[Any, list[Any], list[Any]]:
        """Return the result of a replica's step, and the statistics that it uses and changes."""
        if tf.executing_eagerly():
            self._eager_assignments.start()
            result = step()
            changed = self._eager_assignments.end(self._statistics.values())
            return result, changed, changed
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        result = step()
        return result, *statistics.used_and_assigned([*self._statistics.values()], graph, first)

    def _on_every_replica(self, function: Any) -> Any:
        """Return a `tf.function` that runs the Python function of `function` on every replica.

        An optimizer merges the replicas, which is impossible inside a function that is traced for
        one replica. TensorFlow's strategies do the same.
        """
        if function not in self._functions:
            on_one = function.python_function

            def on_all(*args: Any, **kwargs: Any) -> Any:
                return self.run(on_one, args, kwargs)

            self._functions[function] = collectives.with_python_function(function, on_all)
        return self._functions[function]

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Distribute a dataset as TensorFlow's strategy does, but in `predict` by rows.

        Keras concatenates the predictions of all workers after each step. If TensorFlow sharded by
        files, they would not be in the order of the rows. tf_keras sets the policy itself.
        """
        if strategies.process_count(self) > 1 and fit_hook.running_method() == "predict":
            dataset = _sharded_by_rows(dataset)
        return super().experimental_distribute_dataset(dataset, options)

    def average_statistics(self) -> None:
        """Average the moving statistics over the workers now; all workers must call it."""
        if not self._created or strategies.process_count(self) == 1:
            return
        live = {n: v for n, v in self._statistics.items() if statistics.needs_averaging(v)}
        texts = agreement.gather_texts(self, "average the moving statistics", json.dumps([*live]))
        numbers = sorted(set(live).intersection(*map(json.loads, texts)))
        if self._averages[1] != numbers:  # a model was added or freed
            run = super().run

            def average() -> None:
                for group in statistics.groups([self._statistics[n] for n in numbers]):
                    statistics.assign(group, self._mean(statistics.pack(group)))

            self._averages = tf.function(lambda: run(average), autograph=False), numbers
        self._averages[0]()

    @contextmanager
    def scope(self) -> Iterator[Any]:
        """Enter the strategy: variables created here are mirrored on all workers."""
        patch_tf_keras()
        inside = tf.distribute.has_strategy() and tf.distribute.get_strategy() is self
        creator = nullcontext() if inside else tf.variable_creator_scope(self._create_variable)
        with super().scope() as context, creator:
            yield context

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        if strategies.process_count(self) > 1:
            variable = agreement.create_variable(next_creator, kwargs)
        else:
            variable = next_creator(**kwargs)
        layer = statistics.updating_layer(variable, kwargs)
        if layer is not None:
            statistics.mark_state_of_rows(variable, layer)
            self._statistics[self._created] = variable
            self._created += 1
            self._eager_assignments.watch(variable)
            for before in self._begun:
                before.add(variable)
        return variable

    @contextmanager
    def _recording_new_statistics(self, before: statistics.Before) -> Iterator[None]:
        """Context of a replica's step, which adds the statistics created in it to `before`."""
        self._begun.append(before)
        try:
            yield
        finally:
            self._begun.remove(before)

    def _restore_or_average(self, changed: Sequence[Any], before: statistics.Before) -> None:
        """Restore the statistics that a step has changed, or average them."""
        if not changed:  # a model without BatchNormalization
            return
        if self.statistics_due is not None:
            statistics.mark_averaged_in_rounds(changed)
        skipped = _any(skipped() for skipped, _ in self.skip_conditions.values())
        for group in statistics.groups(changed):
            values = before.restored_if(group, skipped)
            if statistics.needs_averaging(group[0]):
                values = self._mean_if_due(values)
            statistics.assign(group, values)

    def _averaged_logs(self, model: Any, logs: Any) -> Any:
        """Return the logs of a step, with local steps means over the workers; see `BatchLogs`."""
        if self.statistics_due is None:
            return logs
        return self.batch_logs.averaged(model, logs, self.statistics_due(), self._network)

    def _mean_if_due(self, values: tf.Tensor) -> tf.Tensor:
        """Return the mean of statistics over all replicas if `statistics_due`, else `values`."""
        if self.statistics_due is None:
            return self._mean(values)
        return tf.cond(self.statistics_due(), lambda: self._mean(values), lambda: values)

    def _mean(self, values: tf.Tensor) -> tf.Tensor:
        small = values.dtype in (tf.float16, tf.bfloat16)  # a sum may overflow float16
        (total,) = self._network.all_reduce([tf.cast(values, tf.float32) if small else values])
        mean = tf.cast(total / self.num_replicas_in_sync, values.dtype)
        # In a skipped step the values are equal on all workers, and a mean would round them.
        skipped = _any(skipped() for skipped, agreed in self.skip_conditions.values() if agreed)
        return tf.where(skipped, values, mean)


def already_sharded(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> Any:
    """Return a distributed dataset in which `dataset` is this worker's shard.

    By default `tf.distribute` splits a dataset, and each of its batches, among the workers. Here
    every worker reads all batches of its own dataset unchanged. The global batch is the sum of the
    replicas' batches, and an epoch is one pass over this dataset. All workers need the same number
    of batches. Keras's `class_weight` is not supported; put sample weights into the dataset.

    Args:
        dataset: Batches of this worker's examples. With several replicas in a process, the replicas
            take batches in turn.
        strategy: The strategy in whose scope the model was built.

    Returns:
        A distributed dataset for `fit`, `evaluate` or `predict`, from
        `strategy.distribute_datasets_from_function`. `predict` concatenates the workers' batches by
        rank, step by step.

    Raises:
        TypeError: `dataset` is not a `tf.data.Dataset`.

    Example:
        train = tf.data.Dataset.from_tensor_slices((x[rank::workers], y[rank::workers])).batch(32)
        model.fit(tf_redsync.already_sharded(train, strategy))
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "`dataset` must be a `tf.data.Dataset` that is not distributed yet. Received: "
            f"dataset={dataset!r}. Create one with "
            "`tf.data.Dataset.from_tensor_slices(...).batch(n)` or `from_generator`."
        )
    return strategy.distribute_datasets_from_function(lambda _: dataset)


def _sharded_by_rows(dataset: Any) -> Any:
    """Return a dataset that is sharded by rows instead of automatically; warn of other policies."""
    policies = tf.data.experimental.AutoShardPolicy
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy in (policies.FILE, policies.OFF):
        effect = "in a different order" if policy == policies.FILE else "repeatedly or not at all"
        warnings.warn(
            f"`predict` returns the dataset's rows {effect} with this policy. Use "
            f"`AutoShardPolicy.DATA`. Received: auto_shard_policy={policy.name}",
            stacklevel=2,
        )
    if policy != policies.AUTO:
        return dataset
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policies.DATA
    return dataset.with_options(options)


def _any(flags: Iterable[tf.Tensor]) -> tf.Tensor:
    """Return whether any flag is set, a bool scalar; false without flags."""
    return tf.reduce_any([tf.constant(False), *flags])


def _dtype_name(value: Any) -> str:
    dtype = getattr(value, "dtype", type(value))
    return getattr(dtype, "name", str(dtype))


def _check_communication_options(options: Any) -> None:
    """Raise `ValueError` unless these are TensorFlow's options, without a timeout."""
    if options is None:
        return
    if not isinstance(options, type(transport.Options())):  # `Options` itself is a factory
        raise ValueError(
            "`communication_options` must be None or a tf.distribute.experimental."
            f"CommunicationOptions. Received: communication_options={options!r}"
        )
    if options.timeout_seconds:
        raise ValueError(
            "`communication_options` must have no `timeout_seconds`: TensorFlow would block one "
            "thread for that time for every collective. Received: "
            f"timeout_seconds={options.timeout_seconds!r}. Pass `timeout_seconds` to the strategy: "
            "its watchdog reports which worker does not respond."
        )


def _check_timeout(seconds: Any) -> None:
    if seconds is not None:
        checks.real("timeout_seconds", seconds, low=0.0, high=float("inf"), low_open=True)
