"""Predictions of benchmarks/scale/scale.py against manual computations, and their inputs."""

import dataclasses
import json
import os
import subprocess

import pytest

import tf_redsync as rs
from benchmarks import netlab
from benchmarks.scale import measure, plot, prediction, scale, scale_methods
from benchmarks.scale.prediction import Bucket, Cluster, Costs, Model, Payload, Software
from benchmarks.scale.traffic import (
    PAYLOAD,
    TRACED,
    bits_per_second,
    buckets_of,
    bytes_per_second,
)
from tests.loops import loop
from tf_redsync.auto.cost import hops
from tf_redsync.exchange import traffic
from tf_redsync.exchange.layout import TensorSpec, make_buckets

FREE = Software(
    dict.fromkeys(("all_gather", "all_reduce", "all_to_all"), 0.0),
    dict.fromkeys(("all_gather", "all_reduce", "all_to_all"), 0.0),
)


def model(buckets, own=3.0, compute=3.0, update=0.0, decode=0.0, software=FREE):
    methods = {
        "NoExchange": Costs(compute, 0.0, ()),
        "Dense": Costs(own, decode, tuple(buckets)),
    }
    return Model(compute, update, software, methods)


def gather(own, elements=1):
    return Bucket(elements, ((Payload("all_gather", own, 0.0),),))


# ----------------------------------------------------------------------------------- bytes


SPECS = [
    TensorSpec("a", (300, 700), position=0),
    TensorSpec("bias", (700,), position=1),
    TensorSpec("b", (700, 300), position=2),
]


@loop("name", scale_methods.NAMES)
@loop("workers", [2, 33])
def test_bytes_match_a_dry_run(name, workers):
    method = scale_methods.make(name, 0.01)
    assignments = [(a.spec, a.method) for a in rs.Policy(default=method).assign(SPECS)]
    expected = [traffic.messages(b.method, b.layout) for b in make_buckets(assignments, workers)]
    found = buckets_of(method, SPECS)
    assert workers not in TRACED
    assert sum(bucket.elements for bucket in found) == 300 * 700 * 2 + 700
    for bucket, steps in zip(found, expected, strict=True):
        for payloads, messages in zip(bucket.steps, steps, strict=True):
            assert [p.kind for p in payloads] == [m.kind for m in messages]
            for payload, message in zip(payloads, messages, strict=True):
                # Blocks are rounded to whole elements: SparDL's have 21 of 2,100.
                assert payload.sent(workers) == pytest.approx(message.sent, rel=0.03)


@pytest.mark.parametrize(
    ("cls", "workers"), [(rs.contrib.GTopK, (2, 16)), (rs.contrib.SparCML, (4, 32))]
)
def test_rounds_of_pairs_match_a_dry_run(cls, workers):
    """SparCML at 4 %: sparse in four rounds, dense in the fifth."""
    assignments = [(SPECS[0], cls(density=0.04))]
    (bucket,) = buckets_of(assignments[0][1], SPECS[:1])
    software = Software({"all_gather": 1.0}, {"all_gather": 0.0})
    for p in workers:
        (real,) = make_buckets(assignments, p)
        rounds = p.bit_length() - 1
        for payloads, messages in zip(
            bucket.steps, traffic.messages(real.method, real.layout), strict=True
        ):
            nonzero = [found.sent(p) for found in payloads if found.sent(p)]
            assert nonzero == pytest.approx([m.sent for m in messages]) and len(nonzero) == rounds
            assert software.seconds(payloads, p) == 2 * rounds
            _, delay, _ = model([], software=software).exchange(
                payloads, Cluster(p, 1e9, latency=0.5)
            )
            assert delay == 0.5 * rounds


def test_payload_through_two_points():
    # 100 bytes to each other worker, and 800 divided among them.
    sent = {p: (p - 1) * (100 + 800 / p) for p in (4, 16)}
    payload = Payload.through("all_gather", sent)
    assert payload.own == pytest.approx(100) and payload.shared == pytest.approx(800)
    assert payload.sent(2) == pytest.approx(500)
    reduced = Payload.through("all_reduce", {4: 2 * 3 / 4 * 60, 16: 2 * 15 / 16 * 60})
    assert reduced.sent(2) == pytest.approx(60) and reduced.shared == pytest.approx(0)


def test_rates_and_hops():
    assert bits_per_second("100mbit") == 1e8
    assert bits_per_second("2.5gbit") == 2.5e9
    assert bits_per_second("none") == bytes_per_second(float("inf")) == float("inf")
    assert bytes_per_second(1.514e9) == pytest.approx(1.448e9 / 8)
    assert [hops(kind, 8) for kind in ("all_gather", "all_reduce", "all_to_all")] == [7, 14, 1]


# ------------------------------------------------------------------------------ predictions


def test_one_bucket_by_hand():
    software = Software({"all_gather": 0.25}, {"all_gather": 0.01})
    # 3 s until all gradients are ready, 4 x 0.25 s for messages, 300 bytes at 0.01 s each on the
    # core and 100 per second on the link, 3 hops of 0.5 s.
    found = model([gather(100.0)], software=software)
    seconds = found.step_seconds("Dense", Cluster(4, 100.0, latency=0.5))
    assert seconds == pytest.approx(3 + 1 + 3 + 3 + 1.5)


def test_exchanges_overlap_with_the_backward_pass():
    # Forward 1 s, backward 2 s in two equal parts; links need 5 s for each bucket.
    found = model([gather(50.0), gather(50.0)])
    assert found.step_seconds("Dense", Cluster(2, 10.0)) == pytest.approx(1 + 1 + 5 + 5)
    # With 0.5 s each, only the last bucket remains after the backward pass.
    assert found.step_seconds("Dense", Cluster(2, 100.0)) == pytest.approx(3.5)


def test_latencies_of_buckets_overlap():
    found = model([gather(50.0), gather(50.0)])
    seconds = found.step_seconds("Dense", Cluster(2, 100.0, latency=10.0))
    assert seconds == pytest.approx(3 + 0.5 + 10)


def test_update_and_decoding_come_last():
    found = model([gather(100.0, elements=10)], own=3.5, update=0.5, decode=0.01)
    seconds = found.step_seconds("Dense", Cluster(5, 100.0))
    assert seconds == pytest.approx(3.0 + 4 + 0.5 + 3 * 10 * 0.01)


def test_alternating_steps_are_averaged():
    turns = Bucket(1, ((Payload("all_gather", 100, 0),), (Payload("all_gather", 300, 0),)))
    assert model([turns]).step_seconds("Dense", Cluster(2, 100.0)) == pytest.approx(3 + 2)


def test_no_exchange_and_one_worker_only_compute():
    found = model([gather(1e9)])
    assert found.step_seconds("NoExchange", Cluster(64, 1.0, 1.0)) == 3.0
    assert found.step_seconds("NoExchange", Cluster(64, 1.0, speed=4)) == 0.75
    assert found.step_seconds("Dense", Cluster(1, 1.0)) == 3.0


def test_workers_that_share_cores():
    assert prediction.oversubscription(2, 1, 2) == 1
    assert prediction.oversubscription(8, 1, 2) == 4
    assert prediction.oversubscription(2, 1, 16) == 1
    found = model([gather(100.0)], software=Software({"all_gather": 0.0}, {"all_gather": 0.01}))
    # The cores' work takes four times as long, the links' does not.
    seconds = found.step_seconds("Dense", Cluster(8, 100.0, share=4.0))
    assert seconds == pytest.approx(4 * (3 + 7) + 7)


def test_burst_counts_once_per_step():
    found = model([gather(50.0), gather(50.0)])
    seconds = found.step_seconds("Dense", Cluster(2, 1.0, burst=60.0))
    assert seconds == pytest.approx(3 + 40)


def test_crossover():
    growing = Costs(3.0, 0.0, (gather(10.0),))
    steady = Costs(3.5, 0.0, (Bucket(1, ((Payload("all_gather", 0.0, 20.0),),)),))
    found = dataclasses.replace(
        model([]),
        methods={"a": growing, "b": steady, "never": dataclasses.replace(steady, own=9e9)},
    )
    cluster = Cluster(2, 100.0)
    # 3 + (P - 1) / 10 against 3.5 + (P - 1) / P / 5: P = 7.7
    assert prediction.crossover(found, "a", "b", cluster) == 8
    assert prediction.crossover(found, "a", "never", cluster) is None
    assert prediction.crossover(found, "b", "b", cluster) is None


# ---------------------------------------------------------------------------------- report


def both(seconds):
    return {"unlimited": seconds + 0.01, "limited": seconds - 0.01}


def report():
    """Returns a report as written by `--json`, with two methods that send 1 MB on two workers."""
    software = {"per_byte_s": {"all_reduce": 1e-9}, "collective_s": {"all_reduce": 2e-3}}
    software = {k: {kind: v["all_reduce"] for kind in FREE.byte} for k, v in software.items()}
    none = {"processor_s": both(0.1), "decode_s": 0.0, "buckets": []}

    def row(kind, own, processor):
        step = [{"kind": kind, "own": own, "shared": 0.0}]
        bucket = {"elements": 250_000, "steps": [step, step]}
        return {"processor_s": both(processor), "decode_s": 0.0, "buckets": [bucket]}

    methods = {
        "NoExchange": none,
        "Dense": row("all_reduce", 1e6, 0.103),
        "RedSync": row("all_gather", 2e3, 0.11),
        "SparDL": row("all_gather", 2e2, 0.12),
    }
    measured = {name: {"step_s": 0.2, "processor_s": 0.1} for name in methods}
    return {
        "model": "mlp",
        "params": 250_000,
        "density": 0.001,
        "rate": "100mbit",
        "cores": 2,
        "calibration": {
            "unlimited": software,
            "limited": software,
            "update_s": 0.01,
            "methods": methods,
        },
        "measured": [{"workers": 8, "threads": 1, "methods": measured}],
    }


def test_message_costs_are_subtracted_from_computation():
    found = prediction.model_of(report())
    assert found.compute == 0.1
    assert found.methods["Dense"].own == pytest.approx(0.103 - 1e6 * 1e-9 - 2e-3)
    assert found.software.message["all_gather"] == pytest.approx(1e-3)


def test_check():
    rows = scale.check(report())
    none = next(row for row in rows if row["method"] == "NoExchange")
    assert none == {
        "workers": 8,
        "method": "NoExchange",
        "measured_s": 0.2,
        "predicted_s": pytest.approx(0.4),
        "error": pytest.approx(1.0),
        "core_measured_s": 0.1,
        "core_predicted_s": 0.1,
    }
    dense = next(row for row in rows if row["method"] == "Dense")
    sent = 2 * 7 / 8 * 1e6
    core = 4 * (0.1 + sent * 1e-9 + 8 * 1e-3)
    assert dense["predicted_s"] == pytest.approx(
        core + (sent - netlab.BURST_BYTES) / (PAYLOAD * 12.5e6)
    )
    own = 0.103 - 1e6 * 1e-9 - 2e-3
    assert dense["core_predicted_s"] == pytest.approx(own + sent * 1e-9 + 8 * 1e-3)
    text = scale.check_table(rows)
    assert "| NoExchange | 8 | 200.0 | 400.0 | +100 % (!) | 100.0 | 100.0 |" in text
    assert "0 of 4 predictions are within 20 %" in text


def test_predictions_and_plots_from_a_file(tmp_path, capsys):
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(json.dumps(report()))  # as written before the predictions
    plots = [tmp_path / "steps.png", tmp_path / "map.png"]
    flags = ["--calibration", source, "--rate", "1gbit", "--json", target]
    flags += ["--plot", plots[0], "--map", plots[1]]
    assert scale.main([str(flag) for flag in flags]) == 0
    written = json.loads(target.read_text())
    predicted = written["predicted"]
    assert written["check"] == scale.check(report())
    assert predicted["workers"][0] == 2 and predicted["workers"][-1] == 4096
    assert predicted["rate"] == "1gbit"
    gathered = predicted["step_s"]["RedSync"]
    assert gathered == sorted(gathered) and gathered[-1] > gathered[0]
    assert "SparDL overtakes RedSync: from" in capsys.readouterr().out
    for picture in plots:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < 150_000


def test_map_shows_the_fastest_method():
    table = plot.fastest(prediction.model_of(report()), Cluster(2, 1.0))
    assert len(table) == len(plot.MAP_WORKERS)
    assert {len(row) for row in table} == {len(plot.RATES)}
    # On slow links the smallest message wins; on the fastest ones no method beats dense by 10 %.
    assert table[0][0] == "RedSync"
    assert table[plot.MAP_WORKERS.index(512)][0] == "SparDL"
    assert {row[-1] for row in table} == {"Dense"}


def test_every_contour_of_the_map_has_a_label(monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    plot.winners(report(), Cluster(2, 1.0), "unused.png")
    axes = figures[0].axes[0]
    lines = next(c for c in axes.collections if hasattr(c, "allsegs"))
    wanted = [
        f"{level:g}x"
        for level, pieces in zip(lines.levels, lines.allsegs, strict=True)
        for piece in pieces
        if len(piece) > 1
    ]
    assert wanted and sorted(text.get_text() for text in axes.texts) == sorted(wanted)


# ---------------------------------------------------------------------------- command line


def test_arguments():
    args = scale.parse(["--check", "8,2,4", "--methods", "SparDL"])
    assert args.check == [2, 4, 8]
    assert args.methods == ["NoExchange", "Dense", "SparDL"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--check", "1,2"], "at least 2 workers"),
        (["--check", "two"], "invalid literal"),
        (["--methods", "SparDL,Nonsense"], "--methods=SparDL,Nonsense"),
        (["--methods", "SparDL,SparDL"], "different names"),
        (["--rate", "fast"], "rate='fast'"),
        (["--speed", "0"], "--speed"),
        (["--latency-us", "-1"], "--latency-us"),
    ],
)
def test_bad_arguments(flags, message, capsys):
    with pytest.raises(SystemExit):
        scale.parse(flags)
    assert message in capsys.readouterr().err


def test_more_workers_than_memory_are_rejected():
    measure.check_memory(2, 1000)
    with pytest.raises(measure.MeasurementError, match="4000 workers need about .* GB"):
        measure.check_memory(4000, 22_000_000)


# ------------------------------------------------------------------------- real measurements


@pytest.mark.timing
@pytest.mark.distributed
def test_two_workers_are_measured(monkeypatch):
    for variable in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.setenv(variable, "1")
    flags = ["--methods", "RedSync", "--rate", "none", "--batch", "2", "--seconds", "0.1"]
    found = measure.report(scale.parse(flags))
    assert found["batch"] == 2 and found["params"] == 22_609_930
    methods = found["calibration"]["methods"]
    assert list(methods) == ["NoExchange", "Dense", "RedSync"]
    for software in (found["calibration"]["unlimited"], found["calibration"]["limited"]):
        assert all(0 < seconds < 0.1 for seconds in software["collective_s"].values())
        assert all(0 < seconds < 1e-6 for seconds in software["per_byte_s"].values())
    for rate in ("unlimited", "limited"):
        none, dense = (methods[name]["processor_s"][rate] for name in ("NoExchange", "Dense"))
        assert dense > 1.5 * none > 0
    (measured,) = found["measured"]
    assert measured["workers"] == 2 and measured["threads"] == 1
    for name, row in measured["methods"].items():
        assert row["step_s"] > 0 and row["steps"] == 3
        sent = sum(
            p["own"] + p["shared"] / 2 for b in methods[name]["buckets"] for p in b["steps"][0]
        )
        assert row["bytes_per_step"] == pytest.approx(sent, rel=1e-3)
    assert {row["method"] for row in scale.check(found)} == set(methods)


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_network_rate_can_be_changed():
    with netlab.network(2, "10gbit") as lab:
        netlab.set_rate(2, "10mbit")
        assert lab.rate == "10gbit"  # the initial rate
        command = [*lab.wrappers[0], "tc", "qdisc", "show", "dev", netlab.INTERFACE]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        assert "rate 10Mbit" in shown.stdout
        with pytest.raises(ValueError, match="100mbit"):
            netlab.set_rate(2, "none")
    with pytest.raises(netlab.NetworkError):
        netlab.set_rate(2, "10mbit")
