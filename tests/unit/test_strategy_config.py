"""TF_CONFIG is validated before any server starts."""

import errno
import json
import socket

import pytest
import tensorflow as tf

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.cluster.tf_config import check_tf_config


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def config(cluster=None, task=None):
    return json.dumps({"cluster": cluster, "task": task})


TWO = ["a:1000", "b:1000"]
FIRST = {"type": "worker", "index": 0}


@pytest.mark.parametrize(
    "text", [None, "", "{}", '{"cluster": {}}', '{"task": {"type": "worker"}}']
)
def test_no_cluster_is_one_worker(text):
    check_tf_config(text)


def test_good_configs():
    one, two, three = (f"localhost:{port}" for port in free_ports(3))
    check_tf_config(config({"worker": [one, two]}, {"type": "worker", "index": 1}))
    check_tf_config(config({"worker": [one, two]}, {"type": "worker", "index": "1"}))
    check_tf_config(config({"chief": [one], "worker": [two, three]}, {"type": "chief", "index": 0}))
    evaluator = {"type": "evaluator", "index": 0}  # Kubeflow omits it from the cluster
    check_tf_config(config({"chief": [one], "worker": [two]}, evaluator))
    check_tf_config(config({"worker": [one, "[fe80::1]:1000"]}, FIRST))
    # One worker starts no server, so its port may be anything.
    check_tf_config(config({"worker": ["localhost:1"]}, FIRST))


MALFORMED = {
    "not_json": ("{cluster", "is not valid JSON"),
    "single_quotes": ("{'cluster': {}}", "is not valid JSON"),
    "cluster_is_a_list": (config(TWO, FIRST), "`cluster` must map"),
    "cluster_is_text": (config("a:1000", FIRST), "`cluster` must map"),
    "unknown_role": (config({"workers": TWO}, FIRST), "`cluster` must map"),
    "addresses_are_text": (config({"worker": "a:1000,b:1000"}, FIRST), "`cluster.worker` must be"),
    "no_port": (config({"worker": ["a", "b"]}, FIRST), "`cluster.worker` must be"),
    "no_host": (config({"worker": [":1000", "b:1000"]}, FIRST), "`cluster.worker` must be"),
    "port_is_text": (config({"worker": ["a:http", "b:1000"]}, FIRST), "`cluster.worker` must be"),
    "port_is_large": (config({"worker": ["a:65536", "b:1"]}, FIRST), "`cluster.worker` must be"),
    "port_is_zero": (config({"worker": ["a:0", "b:1"]}, FIRST), "`cluster.worker` must be"),
    "address_is_a_number": (config({"worker": [1000, 2000]}, FIRST), "`cluster.worker` must be"),
    "same_twice": (config({"worker": ["a:1", "a:1"]}, FIRST), "appears twice"),
    "same_in_two_roles": (
        config({"chief": ["a:1"], "worker": ["a:1"]}, {"type": "chief", "index": 0}),
        "appears twice",
    ),
    "no_task": (json.dumps({"cluster": {"worker": TWO}}), "`task.type` must be one of"),
    "task_is_text": (config({"worker": TWO}, "worker"), "`task.type` must be one of"),
    "type_is_a_list": (
        config({"worker": TWO}, {"type": ["worker"], "index": 0}),
        "`task.type` must be one of",
    ),
    "too_deep": (100_000 * "[", "is not valid JSON"),
    "no_type": (config({"worker": TWO}, {"index": 0}), "`task.type` must be one of"),
    "role_not_there": (
        config({"worker": TWO}, {"type": "chief", "index": 0}),
        "`task.type` must be one of ['evaluator', 'worker']",
    ),
    "no_index": (config({"worker": TWO}, {"type": "worker"}), "`task.index` must be in 0..1"),
    "index_too_large": (
        config({"worker": TWO}, {"type": "worker", "index": 2}),
        "`task.index` must be in 0..1",
    ),
    "index_negative": (config({"worker": TWO}, {"type": "worker", "index": -1}), "`task.index`"),
    "index_is_text": (config({"worker": TWO}, {"type": "worker", "index": "x"}), "`task.index`"),
    "index_is_a_bool": (config({"worker": TWO}, {"type": "worker", "index": True}), "`task.index`"),
    "index_is_a_superscript": (
        config({"worker": TWO}, {"type": "worker", "index": "\u00b2"}),
        "`task.index`",
    ),
    "port_is_a_superscript": (
        config({"worker": ["a:1", "b:\u00b2"]}, FIRST),
        "`cluster.worker` must be a list",
    ),
    "port_of_other_digits": (
        config({"worker": ["a:1", "b:\u0967"]}, FIRST),
        "`cluster.worker` must be a list",
    ),
    "port_is_endless": (config({"worker": ["a:1", f"b:{5000 * '9'}"]}, FIRST), "`cluster.worker`"),
    "no_brackets": (config({"worker": ["::1:1000", "b:1"]}, FIRST), "'[addr]:port'"),
    "second_evaluator": (
        config({"worker": TWO}, {"type": "evaluator", "index": 1}),
        "`task.index`",
    ),
    "index_is_a_float": (config({"worker": TWO}, {"type": "worker", "index": 0.5}), "`task.index`"),
}

CHIEF = {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"], "evaluator": ["e:5"]}
RANKS = {
    "none": (None, (0, 1)),
    "empty": ("", (0, 1)),
    "no_cluster": ("{}", (0, 1)),
    "alone": (config({"worker": ["a:1"]}, FIRST), (0, 1)),
    "second": (config({"worker": TWO}, {"type": "worker", "index": 1}), (1, 2)),
    "text": (config({"worker": TWO}, {"type": "worker", "index": "1"}), (1, 2)),
    "chief": (config(CHIEF, {"type": "chief", "index": 0}), (0, 3)),
    "beside_a_chief": (config(CHIEF, {"type": "worker", "index": 1}), (2, 3)),
}


@loop("name", RANKS)
def test_rank_and_size(name):
    text, expected = RANKS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TF_CONFIG", raising=False)
        if text is not None:
            patch.setenv("TF_CONFIG", text)
        assert (rs.rank(), rs.size()) == expected


def test_tasks_without_a_rank(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config(CHIEF, {"type": "evaluator", "index": 0}))
    assert rs.size() == 3
    with pytest.raises(ValueError, match="'evaluator'"):
        rs.rank()
    monkeypatch.setenv("TF_CONFIG", config({"worker": TWO}, {"type": "evaluator", "index": 0}))
    assert rs.size() == 2
    with pytest.raises(ValueError, match="'evaluator'"):
        rs.rank()
    with pytest.raises(ValueError, match="evaluator.*no strategy"):
        rs.MultiWorkerMirroredStrategy()
    monkeypatch.setenv("TF_CONFIG", config({"worker": TWO}, {"type": "worker", "index": 2}))
    for function in (rs.rank, rs.size):
        with pytest.raises(ValueError, match="`task.index`"):
            function()


@pytest.mark.parametrize(
    ("name", "meant"), [("TopKK", "TopK"), ("redsync", "RedSync"), ("xyzzy", "")]
)
def test_unknown_name_suggests_a_similar_one(name, meant):
    with pytest.raises(AttributeError) as error:
        getattr(rs, name)
    assert name in str(error.value)
    assert str(error.value).endswith(f"Did you mean {meant}?" if meant else "attribute 'xyzzy'")


@pytest.mark.parametrize(("name", "use"), [("allreduce", "replica context"), ("init", "Strategy")])
def test_name_of_horovod_has_its_replacement(name, use):
    with pytest.raises(AttributeError, match=f"Horovod's `{name}`.*{use}.*migrating.md"):
        getattr(rs, name)


@loop("name", MALFORMED)
def test_malformed(name):
    text, problem = MALFORMED[name]
    with pytest.raises(ValueError) as error:
        check_tf_config(text)
    assert str(error.value).startswith("TF_CONFIG: ")
    assert problem in str(error.value)
    assert f"Received: TF_CONFIG={text}" in str(error.value)
    assert '"task": {"type": "worker", "index": 0}' in str(error.value)  # an example of the format


@pytest.mark.parametrize(
    "text",
    ["[1, 2]", "5", '"worker"', '{"clusters": {"worker": ["a:1", "b:1"]}, "task": {}}', "null"],
)
def test_malformed_top_level(text):
    with pytest.raises(ValueError, match="TF_CONFIG"):
        check_tf_config(text)


def test_port_in_use():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = free_ports(1)[0]
        text = config({"worker": [f"localhost:{port}", f"localhost:{other}"]}, FIRST)
        with pytest.raises(ValueError) as error:
            check_tf_config(text)
        assert f"port {port} is in use" in str(error.value)
        assert f"Received: address=localhost:{port}" in str(error.value)
        # The other worker checks its own port.
        check_tf_config(text.replace('"index": 0', '"index": 1'))


def test_strategy_validates_before_it_starts_servers(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", MALFORMED["same_twice"][0])
    with pytest.raises(ValueError, match="TF_CONFIG: .*appears twice"):
        rs.MultiWorkerMirroredStrategy()


def test_empty_tf_config_is_one_worker(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "")
    assert rs.MultiWorkerMirroredStrategy().num_replicas_in_sync == 1


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), True, "600"])
def test_bad_timeout(timeout):
    with pytest.raises(ValueError, match=f"`timeout_seconds` must be.*timeout_seconds={timeout!r}"):
        rs.MultiWorkerMirroredStrategy(timeout_seconds=timeout)


@pytest.mark.parametrize("timeout", [12.5, float("inf"), None])
def test_collectives_have_no_timeout(timeout):
    strategy = rs.MultiWorkerMirroredStrategy(timeout_seconds=timeout)
    assert not strategy.extended._communication_options.timeout_seconds
    assert strategy.num_replicas_in_sync == 1


def test_timeout_for_collectives_is_rejected():
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=30.0)
    with pytest.raises(ValueError, match="(?s)`communication_options`.*=30.0.*`timeout_seconds`"):
        rs.MultiWorkerMirroredStrategy(communication_options=options)


@pytest.mark.parametrize("options", [30.0, "NCCL", tf.distribute.experimental.CommunicationOptions])
def test_bad_options_for_collectives(options):
    with pytest.raises(ValueError, match="`communication_options` must be None or"):
        rs.MultiWorkerMirroredStrategy(communication_options=options)


def test_options_are_given_by_name():
    """TensorFlow's second positional argument is another one than the second here."""
    options = tf.distribute.experimental.CommunicationOptions()
    with pytest.raises(TypeError, match="positional"):
        rs.MultiWorkerMirroredStrategy(None, options)


def test_other_options_for_collectives_are_forwarded():
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=77)
    strategy = rs.MultiWorkerMirroredStrategy(timeout_seconds=3.0, communication_options=options)
    assert strategy.extended._communication_options.bytes_per_pack == 77


def test_port_that_needs_a_privilege_is_named(monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "socket", type("Socket", (socket.socket,), {"bind": denied}))
    with pytest.raises(ValueError, match="may not listen on port 80 .*address=a:80"):
        check_tf_config(config({"worker": ["a:80", "b:80"]}, FIRST))


def test_one_worker_reduces_as_several_do():
    """A script that passes on one worker should not raise on two."""
    strategy = rs.MultiWorkerMirroredStrategy()
    rows = tf.constant([100, 100], tf.int8)
    for value in (True, tf.constant(["a"]), tf.ragged.constant([[1], [2, 3]])):
        with pytest.raises(TypeError, match="`strategy.reduce`"):
            strategy.reduce("SUM", value, axis=None)
    with pytest.raises(tf.errors.InvalidArgumentError, match="overflows int8"):
        strategy.reduce("SUM", rows, axis=0)
    for reduce_op in ("MEAN", "mean", tf.distribute.ReduceOp.MEAN):
        for value in (rows, tf.cast(rows, tf.int32)):
            mean = strategy.reduce(reduce_op, {"a": value}, axis=None)["a"]
            assert mean.dtype == tf.float64 and mean.numpy().tolist() == [100, 100]
    total = strategy.reduce("SUM", rows, axis=None)
    assert total.dtype == tf.int8 and total.numpy().tolist() == [100, 100]
    assert strategy.reduce("SUM", [None, 3], axis=None) == [None, 3]
