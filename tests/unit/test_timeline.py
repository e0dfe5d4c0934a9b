"""step/timeline.py: events, lanes, sums, trace and plot of a profile."""

import json
import types

import keras
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tf_redsync as rs
from benchmarks.step import anatomy, timeline, timeline_view, timeline_worker, trace_events
from benchmarks.step.trace_events import Event

# One step of 100 microseconds: (thread, name in the profile, start, end).
PROFILE = (
    ("python", "train", 0, 100),
    ("pool", "ExecutorState::Process", 0, 90),
    ("pool", "mlp_1/dense_1/Relu:_MklNativeFusedMatMul", 2, 20),
    ("pool", "gradient_tape/mlp_1/dense_1_2/MatMul/MatMul:MatMul", 20, 30),
    ("pool", "sgd/RedsyncAccumulateAndSelect:RedsyncAccumulateAndSelect", 30, 40),
    ("pool", "sgd/CollectiveGatherV2:CollectiveGatherV2", 40, 70),
    ("pool", "gradient_tape/mlp_1/dense_1/MatMul/MatMul:MatMul", 42, 60),
    ("pool2", "sgd/CollectiveReduceV2:CollectiveReduceV2", 50, 75),
    ("pool", "sgd/Abs:Abs", 75, 80),
    ("pool", "sgd/cond/then/_0/sgd/cond/AssignVariableOp:AssignVariableOp", 80, 85),
    ("pool", "sgd/cond:If", 80, 90),
    ("pool", "sgd/cond_1/then/_9/Mul:Mul", 85, 90),
    ("pool", "CollectiveReduceV2:CollectiveReduceV2", 110, 120),  # between two steps
)


def profile():
    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/host:CPU")
    lines = {}
    for number, (thread, name, start, end) in enumerate(PROFILE, 1):
        plane.event_metadata[number].id = number
        plane.event_metadata[number].name = name
        if thread not in lines:
            lines[thread] = plane.lines.add(name=thread, timestamp_ns=7000)
        lines[thread].events.add(
            metadata_id=number, offset_ps=10**6 * start, duration_ps=10**6 * (end - start)
        )
    space.planes.add(name="/host:metadata")
    return space


def recording(profile):
    steps, ops = trace_events.host_events(profile, "train")
    requests = [
        {"type": "CollectiveGatherV2", "tensors": ["mlp/dense_1/kernel"]},
        {"type": "CollectiveReduceV2", "tensors": ["mlp/dense_1/bias", "mlp/dense/bias"]},
        {"type": "CollectiveGatherV2", "tensors": ["mlp/dense/kernel"]},  # not in the profile
    ]
    return timeline_view.Recording(steps, ops, "sgd", {"sgd/Abs": "decode"}, requests, "mlp")


def test_events_of_a_profile(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError, match="no .xplane.pb below"):
        trace_events.read(tmp_path)
    (tmp_path / "a" / "host.xplane.pb").write_bytes(profile().SerializeToString())
    steps, ops = trace_events.host_events(trace_events.read(tmp_path), "train")
    assert steps == [Event("train", "", 7.0, 107.0, "python")]
    assert ops[0] == Event("mlp_1/dense_1/Relu", "MklNativeFusedMatMul", 9.0, 27.0, "pool")
    assert len(ops) == len(PROFILE) - 3  # without the step, the executor and the branch


def test_lanes_and_sums():
    found = recording(profile())
    lanes = found.lanes(found.steps[0])
    assert {name: len(ops) for name, ops in lanes.items()} == {
        "forward": 1, "backward": 2, "selection": 1, "decode": 1, "update": 2, "collective": 2,
        "other": 0,
    }  # fmt: skip
    parts = anatomy.parts(found.steps[0], lanes)
    expected = {
        "forward": 18, "backward": 28, "selection": 10, "decode": 5, "update": 10, "other": 0,
        "wall": 100, "computing": 71, "collectives": 35, "hidden": 18, "exposed": 17, "idle": 12,
    }  # fmt: skip
    assert {k: round(1e3 * v, 6) for k, v in parts.items()} == expected
    assert "hidden: 51% of the collectives' time" in timeline.table(timeline.summary(found, [0.2]))


def test_spans():
    merged = trace_events.union([(5, 6), (0, 2), (1, 3), (3, 4)])
    assert merged == [(0, 4), (5, 6)] and trace_events.length(merged) == 5
    assert trace_events.overlap(merged, [(3, 5.5)]) == 1.5
    event = Event("x", "X", 1.0, 10.0, "")
    outside = timeline_view._outside(event, [(0, 2), (4, 5), (9, 12), (13, 14)])
    assert outside == [(2, 4), (5, 9)]
    assert timeline_view._outside(event, [(2, 3)]) == [(1.0, 2), (3, 10.0)]


def test_trace_and_plot(tmp_path):
    found = recording(profile())
    trace = json.loads(json.dumps(timeline_view.chrome_trace(found, "title")))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    spans = [e for e in trace if e["ph"] == "X"]
    assert {names[e["tid"]] for e in spans} == {
        "step", "forward", "backward", "selection", "all-gather: dense_1",
        "all-reduce: dense_1, dense", "decode", "update",
    }  # fmt: skip
    gather = next(e for e in spans if e["name"] == "sgd/CollectiveGatherV2")
    assert (gather["ts"], gather["dur"], gather["args"]["op"]) == (40, 30, "CollectiveGatherV2")
    assert gather["args"]["tensors"] == ["mlp/dense_1/kernel"]
    for thread in names:  # a thread's events must not overlap, or viewers nest them
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == thread)
        assert all(a[1] <= b[0] for a, b in zip(mine, mine[1:], strict=False))
    timeline_view.plot(found, "title", str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_names_of_layers():
    found = recording(profile())
    layers = [found.layer(op) for op in found.ops]
    # the scopes have numbers, because the model's name has one
    assert layers[:2] == ["dense", "dense_1"]
    assert found.layer(Event("mlp/dense_1/Relu", "Relu", 0, 1, "")) == "dense_1"
    assert found.layer(Event("sgd/Abs", "Abs", 0, 1, "")) == ""


def test_roles_follow_from_the_graph():
    with tf.Graph().as_default() as graph, tf.name_scope("sgd/"):
        x = tf.constant(1.0, name="before")
        sent = tf.raw_ops.CollectiveReduceV2(
            input=tf.square(x), group_size=2, group_key=1, instance_key=1,
            ordering_token=[], merge_op="Add", final_op="Id",
        )  # fmt: skip
        tf.abs(sent)
        tf.constant(2.0, name="apart")
    roles = anatomy.roles(graph, "sgd")
    assert roles["sgd/before"] == roles["sgd/Square"] == "selection"
    assert roles["sgd/Abs"] == "decode" and "sgd/apart" not in roles


def test_requests_are_in_the_drivers_order():
    optimizer = rs.DistributedOptimizer(
        keras.optimizers.SGD(0.1), rs.PowerSGD(rank=1), bucket_bytes=4096
    )
    shapes = {"a": (64, 64), "b": (64, 64), "c": (64,)}
    variables = [keras.Variable(tf.ones(s), name=n) for n, s in shapes.items()]
    optimizer.build(variables)
    requests = timeline_worker.requests_of(optimizer)
    tensors = [[name.split("/")[-1] for name in r["tensors"]] for r in requests]
    assert tensors == [["b"], ["a"], ["c"], ["b"], ["a"]]  # two rounds of the matrices
    assert {r["type"] for r in requests} == {"CollectiveReduceV2"}
    assert timeline_worker.requests_of(types.SimpleNamespace()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--method", "none,dense"], "must be one method"),
        (["--steps", "0"], "`--steps` must be at least 1. Received: --steps=0"),
        (["--rate", "fast"], "`rate` must be none, or like 100mbit"),
    ],
)
def test_bad_arguments(capsys, args, words):
    with pytest.raises(SystemExit) as exit_:
        timeline.main(args)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err
