"""Configs of methods, policies and the wrapper: Keras's conventions, errors, older files."""

import dataclasses
import json

import keras
import numpy as np
import pytest
import tf_keras

import tf_redsync as rs
from tests.loops import loop
from tf_redsync import config
from tf_redsync.methods import from_config, register, serialize

# As version 0.1.0 wrote it into a model's file.
OLD = {
    "class_name": "Policy",
    "config": {
        "default": {
            "class_name": "TopK",
            "config": {"density": 0.25, "dense_below": 16},
        },
        "rules": [
            {
                "class_name": "Rule",
                "config": {
                    "pattern": "embedding",
                    "method": {
                        "class_name": "Dense",
                        "config": {"momentum": 0.0, "nesterov": False},
                    },
                },
            }
        ],
        "output_layer": None,
    },
}


@pytest.fixture
def own_method(monkeypatch):
    """A user's method with a required argument; the registry is restored afterwards."""
    monkeypatch.setattr(config, "_REGISTRY", config.registered())

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(rs.Dense):
        levels: int

    return Mine


def test_files_of_older_versions_load():
    rule = rs.Rule(pattern="embedding", method=rs.Dense())
    expected = rs.Policy(default=rs.TopK(density=0.25, dense_below=16), rules=(rule,))
    assert from_config(json.loads(json.dumps(OLD))) == expected


def test_keras_conventions():
    method = rs.RedSync(density=0.01, warm_up=rs.DenseWarmUp(3))
    plain = json.loads(json.dumps(method.get_config()))
    assert plain["density"] == 0.01 and "class_name" not in plain
    assert rs.RedSync.from_config(plain) == method
    assert from_config(serialize(method)) == method


def test_user_methods(own_method):
    optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), own_method(levels=3))
    saved = json.loads(json.dumps(optimizer.get_config()))
    with pytest.raises(ValueError, match="'Mine'"):
        type(optimizer).from_config(saved)
    for made in (
        lambda: type(optimizer).from_config(saved, custom_objects={"Mine": own_method}),
        lambda: keras.saving.deserialize_keras_object(
            keras.saving.serialize_keras_object(optimizer), custom_objects={"Mine": own_method}
        ),
    ):
        assert made().method == own_method(levels=3)
    register(own_method)
    assert type(optimizer).from_config(saved).method == own_method(levels=3)
    entry = next(e for e in rs.methods.table().entries if e.name == "Mine")
    assert entry.conserves is None and "Mine" in str(rs.methods.table())


def test_taken_name_is_rejected(own_method):
    del own_method
    redsync = rs.RedSync
    with pytest.raises(ValueError, match=r"RedSync.*mine\.RedSync"):
        register(type("RedSync", (rs.Dense,), {"__module__": "mine"}))
    assert config.registered()["RedSync"] is redsync
    register(redsync)  # registered again, as by a notebook cell


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ({"class_name": "TopK"}, "'class_name' and 'config'"),
        ({"class_name": "Rule", "config": {"pattern": "x"}}, "Rule.*missing.*method"),
        ({"class_name": "TopK", "config": {"nope": 1}}, "TopK.*unknown.*nope"),
        ({"class_name": "TopK", "config": None}, "must be a dict"),
        ({"class_name": ["TopK"], "config": {}}, "`class_name` must be one of"),
    ],
)
def test_broken_configs(broken, what):
    with pytest.raises(ValueError, match=what):
        from_config(broken)


@pytest.mark.parametrize(
    "inner",
    [
        keras.optimizers.SGD,
        tf_keras.optimizers.SGD,
        tf_keras.optimizers.legacy.SGD,
        lambda rate: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(rate)),
    ],
)
def test_public_class_loads_configs_of_all_families(inner):
    optimizer = rs.DistributedOptimizer(
        inner(0.1), rs.TopK(), warm_up=rs.DenseWarmUp(steps=3), check_every=7
    )
    saved = optimizer.get_config()
    loaded = rs.DistributedOptimizer.from_config(json.loads(json.dumps(saved)))
    assert type(loaded) is type(optimizer) and loaded.get_config() == saved


def test_config_of_an_unknown_family():
    class Own(tf_keras.optimizers.legacy.SGD):
        pass

    optimizer = rs.DistributedOptimizer(Own(0.1), rs.TopK())
    with pytest.raises(ValueError, match=r"type\(optimizer\).from_config"):
        rs.DistributedOptimizer.from_config(optimizer.get_config())


def test_broken_config_of_a_wrapper():
    optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.Dense())
    saved = optimizer.get_config()
    for key in ("inner_optimizer", "method"):
        with pytest.raises(ValueError, match=key):
            type(optimizer).from_config({k: v for k, v in saved.items() if k != key})
    for made_by in (type(optimizer), rs.DistributedOptimizer):
        with pytest.raises(ValueError, match=r"'learning_rate'.*\[\"inner_optimizer\"\]"):
            made_by.from_config({**saved, "learning_rate": 0.2})
    saved["inner_optimizer"]["config"]["learning_rate"] = 0.2
    loaded = rs.DistributedOptimizer.from_config(saved)
    assert loaded.learning_rate.numpy() == pytest.approx(0.2)


NUMPY = {bool: np.bool_, int: np.int64, float: np.float64, str: np.str_}


def assert_same_from_numpy(cls, **options):
    """Assert that NumPy scalars make the object that Python values of these options make."""

    def converted(value):
        if isinstance(value, tuple):
            return tuple(map(converted, value))
        return NUMPY[type(value)](value)

    expected, found = cls(**options), cls(**{n: converted(v) for n, v in options.items()})
    assert found == expected and hash(found) == hash(expected) and repr(found) == repr(expected)
    for name, value in options.items():
        kept = getattr(found, name)
        assert type(kept) is type(value), name
        assert not isinstance(kept, tuple) or [type(k) for k in kept] == [type(v) for v in value]
    assert json.dumps(found.get_config()) == json.dumps(expected.get_config())


def test_fields_given_as_numpy_scalars():
    tested = 0
    for cls in config.registered().values():
        for field in dataclasses.fields(cls) if not config.required(cls) else ():
            if field.init and type(field.default) in NUMPY:
                assert_same_from_numpy(cls, **{field.name: field.default})
                tested += 1
    assert tested > 200


@loop(
    ("cls", "options"),
    [
        (rs.CodedTopK, {"steps": 4, "masking": False}),
        (rs.DGC, {"clip_norm": 2.0}),
        (rs.Auto, {"max_overhead": 0.1, "step_seconds": 2.0}),
        (rs.DenseWarmUp, {"steps": 7}),
        (rs.DenseWarmUp, {"fraction": 0.1}),
        (rs.ExponentialWarmUp, {"steps_per_stage": 3, "densities": (0.5, 0.25)}),
        (rs.DensityStages, {"begins": (0, 10), "densities": (0.5, 0.25)}),
        (rs.contrib.LGC, {"channels": (8, 16), "decoder_channels": (8, 16), "code_channels": 2}),
        (rs.contrib.PostLocalSGD, {"start": 0.5}),
    ],
)
def test_optional_fields_and_tuples_given_as_numpy_scalars(cls, options):
    assert_same_from_numpy(cls, **options)


def test_positional_numpy_scalar():
    assert repr(rs.DenseWarmUp(np.int64(3))) == repr(rs.DenseWarmUp(3))


def test_options_of_a_wrapper_given_as_numpy_scalars():
    options = {
        "bucket_bytes": 2**20,
        "direct_collectives": True,
        "two_levels": False,
        "max_skipped_steps": 3,
        "check_every": 20,
    }
    scalars = {n: NUMPY[type(v)](v) for n, v in options.items()}
    optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.TopK(), **scalars)
    saved = json.loads(json.dumps(optimizer.get_config()))
    assert {n: saved[n] for n in options} == options


@pytest.mark.parametrize("value", [True, 1.5, 0, -1, "1MB"])
def test_bad_bucket_bytes(value):
    with pytest.raises(ValueError, match=f"`bucket_bytes` must be.*bucket_bytes={value!r}"):
        rs.DistributedOptimizer(keras.optimizers.SGD(0.1), rs.TopK(), bucket_bytes=value)
