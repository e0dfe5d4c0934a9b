"""Workers with different amounts of data raise an error that names them, or end together."""

import pytest

from tests.distributed.cluster import LEGACY, run_workers


def differ(family):
    """Train, evaluate and predict with different amounts of data, in one job."""
    import keras
    import numpy as np
    import tf_keras

    import tf_redsync as rs
    from tests.distributed import problems

    library = keras if family == "keras3" else tf_keras
    rank = problems.rank()
    strategy = rs.MultiWorkerMirroredStrategy(timeout_seconds=30)
    with strategy.scope():
        model = problems.network(library)
        inner = library.optimizers.SGD(0.01)
        optimizer = rs.DistributedOptimizer(inner, rs.RedSync(density=0.1, dense_below=16))
        model.compile(optimizer=optimizer, loss="mse")
    rows = 256 if rank else 320
    x, y = problems.regression(rows)
    data, same = problems.dataset(rows, 32), problems.dataset(320, 32)
    unknown = data.filter(lambda *_: True)

    def sharded(batches):
        return rs.already_sharded(same.take(batches), strategy)

    def fit_shards(own, validated, **options):
        """Distribute the validation data last."""
        train, validation = sharded(own), sharded(validated)
        model.fit(
            train,
            steps_per_epoch=6,
            validation_data=validation,
            validation_steps=3,
            verbose=0,
            **options,
        )

    cases = {
        "arrays": lambda: model.fit(x, y, batch_size=32, verbose=0),
        "datasets": lambda: model.fit(data, verbose=0),
        "two epochs": lambda: model.fit(data, steps_per_epoch=6, epochs=2, verbose=0),
        "infinite": lambda: model.fit(
            same.repeat() if rank else same, steps_per_epoch=10, verbose=0
        ),
        "steps": lambda: model.fit(same.repeat(), steps_per_epoch=3 + rank, verbose=0),
        "unknown and known": lambda: model.fit(unknown if rank else data, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, batch_size=32, verbose=0),
        "predict": lambda: model.predict(x, batch_size=32, verbose=0),
        "validation": lambda: model.fit(same, validation_data=data, verbose=0),
        "enough": lambda: model.fit(data, steps_per_epoch=4, epochs=2, verbose=0),
        "enough for the last epoch": lambda: model.fit(
            data, steps_per_epoch=6, epochs=2, initial_epoch=1, verbose=0
        ),
        "enough for validation": lambda: model.fit(
            same, validation_data=data, validation_steps=2, verbose=0
        ),
        "enough for each validation": lambda: model.fit(
            same, epochs=5, validation_data=data, validation_steps=2, verbose=0
        ),
        "enough in validation shards": lambda: fit_shards(6, 3 + rank),
        "shards": lambda: fit_shards(6 + rank, 3, epochs=2),
        "unknown": lambda: model.fit(unknown, epochs=2, verbose=0),
    }
    found = {}
    for name, case in cases.items():
        try:
            case()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "no error"
    found["weights"] = np.concatenate([w.ravel() for w in model.get_weights()])
    found["skipped"] = int(optimizer.exchange.skipped.numpy())
    return found


@pytest.mark.parametrize("family", ["keras3", pytest.param("tf_keras", marks=pytest.mark.deep)])
def test_error_names_different_amounts_of_data(family):
    both = run_workers(differ, args=(family,), env=LEGACY if family == "tf_keras" else None)
    fine = [case for case in both[0] if str(case).startswith("enough") or case == "unknown"]
    for seen in both:
        for case in fine:
            assert seen[case] == "no error", f"{case}: {seen[case]}"
        for case in set(seen) - {*fine, "weights", "skipped"}:
            text = str(seen[case])
            assert text.startswith("Disagreement: the workers disagree"), f"{case}: {text}"
            assert "worker 0: " in text and "worker 1: " in text, text
        for case in ("arrays", "datasets", "evaluate", "predict", "validation"):
            text = str(seen[case])
            assert "10 batches" in text and "8 batches" in text and "take(8)" in text
        assert seen["skipped"] == 0
    assert (both[0]["weights"] == both[1]["weights"]).all()
