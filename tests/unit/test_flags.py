"""Flags of absl that select the exchange, and their errors."""

import json
import sys

import pytest
from absl import flags as absl_flags

import tf_redsync as rs
from tests.loops import loop
from tf_redsync import config, flags


def parse(*words, **defaults):
    values = absl_flags.FlagValues()
    flags.define(values=values, **defaults)
    values(["train.py", *words])
    return flags.exchange(values)


def test_methods():
    assert parse() == {"method": rs.Auto()}
    assert parse(exchange="CodedGMC(momentum=0.9)") == {"method": rs.CodedGMC(momentum=0.9)}
    for name in ("redsync", "RedSync"):
        assert parse(f"--exchange={name}") == {"method": rs.RedSync()}
    assert parse("--exchange=rs.TopK(density=0.1)", "--density=0.2") == {
        "method": rs.TopK(density=0.2)
    }
    assert parse("--exchange=RedSync(), warm_up=DenseWarmUp(fraction=0.1), two_levels=False") == {
        "method": rs.RedSync(), "warm_up": rs.DenseWarmUp(fraction=0.1), "two_levels": False
    }  # fmt: skip
    policy = "Policy(default=RedSync(), rules=(Rule(pattern='embedding', method=Dense()),))"
    assert parse(f"--exchange={policy}")["method"].rules[0].method == rs.Dense()


def test_help_of_a_script_lists_them():
    values = absl_flags.FlagValues()
    flags.define(values=values)
    own = {flag.name for flag in values.get_key_flags_for_module(sys.modules[__name__])}
    assert own == {"exchange", "exchange_config", "density", "run_dir"}


@pytest.mark.parametrize("text", ["Mine(density=0.5)", "mine"])
def test_registered_method_of_the_user(monkeypatch, text):
    monkeypatch.setattr(config, "_REGISTRY", config.registered())
    with pytest.raises(absl_flags.IllegalFlagValueError, match="(?i)mine"):
        parse(f"--exchange={text}", "--density=0.5")

    @config.register
    class Mine(rs.TopK):
        pass

    assert parse(f"--exchange={text}", "--density=0.5") == {"method": Mine(density=0.5)}


def test_configs(tmp_path):
    policy = rs.Policy(default=rs.RedSync(density=0.01), output_layer="logits")
    text = json.dumps(config.serialize(policy))
    assert parse(f"--exchange_config={text}")["method"] == policy
    path = tmp_path / "method.json"
    path.write_text(json.dumps(config.serialize(rs.PowerSGD(rank=2))))
    assert parse(f"--exchange_config={path}")["method"] == rs.PowerSGD(rank=2)


WRONG = {
    "--exchange=redsnyc": "'redsnyc'. Did you mean RedSync?",
    "--exchange=RedSync(densty=0.1)": "Did you mean `density`?",
    "--exchange=RedSync(density=2)": "`density` must be in (0, 1]",
    "--exchange=RedSync(": "Received: 'RedSync('",
    "--exchange=__import__('os')": "__import__",
    "--density=0.1 --exchange=dense": "Received: 0.1 with Dense",
    "--density=7 --exchange=redsync": "`density` must be in (0, 1]",
    "--density=much": "could not convert string to float",
    "--exchange_config=nowhere.json": "Received: 'nowhere.json'",
    "--exchange_config={}": "'class_name'",
    "--exchange_config={]": "--exchange_config: invalid JSON",
    "--exchange_config=/": "existing JSON file",
    f"--exchange_config={'x' * 5000}": "existing JSON file",
    '--exchange_config={"class_name":["TopK"],"config":{}}': "`class_name` must be one of",
    '--exchange_config={"class_name":"TopK","config":{"density":[1]}}': "Received: '{\"class_name",
    '--exchange_config={"class_name":"CodedTopK","config":{"warm_up":3}}': "--exchange_config: ",
    '--exchange_config={"class_name":"Policy","config":{"default":{"class_name":"TopK","config":{}}'
    ',"rules":1}}': "--exchange_config: ",
    '--exchange_config={"class_name":"DenseWarmUp","config":{"steps":3}}': "a method or a policy",
    "--exchange=TopK(),foo=3": "unknown argument `foo`",
    "--exchange=TopK(),warmup=None": "Did you mean `warm_up`?",
    "--exchange=TopK(),method=Dense()": "unknown argument `method`",
    "--exchange=TopK(),optimizer=1": "unknown argument `optimizer`",
    "--exchange=TopK(density={[]:1})": "arguments must be numbers",
    "--exchange=TopK())(RedSync()": "exactly one method",
    "--exchange=TopK()).x(RedSync()": "exactly one method",
    "--exchange=Dense.preset()": "Dense has no presets",
    "--exchange=TopK(density=0.1,density=0.2)": "`density` is given twice",
    "--exchange=TopK(),**{}": "`**` is not supported",
    "--density=0.1 --exchange=Auto(candidates=(TopK(),))": "Received: 0.1 with Auto(candidates",
    f"--exchange=TopK(density={'-' * 5000}1)": "too many nested",
}


def test_no_default():
    text = json.dumps(config.serialize(rs.TopK()))
    assert parse(f"--exchange_config={text}", exchange=None) == {"method": rs.TopK()}
    with pytest.raises(absl_flags.IllegalFlagValueError, match="--exchange_config.*exchange=None"):
        parse(exchange=None)


@loop("words", WRONG)
def test_errors_are_raised_while_flags_are_parsed(words):
    with pytest.raises(absl_flags.Error) as error:
        parse(*words.split(" "))
    assert WRONG[words] in str(error.value)


def test_flags_create_an_optimizer():
    import keras

    found = parse("--exchange=TopK(density=0.1), max_skipped_steps=3")
    optimizer = rs.DistributedOptimizer(keras.optimizers.SGD(0.1), **found)
    assert optimizer.method == rs.TopK(density=0.1)
