"""`fit` raises for Keras callbacks that would write the same file on two workers."""

import json

import keras
import pytest
import tensorflow as tf
import tf_keras

from tests.loops import loop
from tf_redsync.keras import backups

# Keras before 3.14 has none.
OrbaxCheckpoint = getattr(keras.callbacks, "OrbaxCheckpoint", None) or type(
    "OrbaxCheckpoint", (keras.callbacks.Callback,), {"__module__": "keras.callbacks"}
)


class Orbax(OrbaxCheckpoint):
    """A user's subclass without the package that Keras's constructor requires."""

    def __init__(self, directory):
        keras.callbacks.Callback.__init__(self)
        self.directory = directory


KINDS = {
    "OrbaxCheckpoint": Orbax,
    "ModelCheckpoint": lambda path: keras.callbacks.ModelCheckpoint(f"{path}/{{epoch}}.keras"),
    "CSVLogger": lambda path: keras.callbacks.CSVLogger(f"{path}/log.csv"),
    "CSVLogger of tf_keras": lambda path: tf_keras.callbacks.CSVLogger(f"{path}/log.csv"),
    "BackupAndRestore": keras.callbacks.BackupAndRestore,
}


class Model:
    distribute_strategy = tf.distribute.get_strategy()


@pytest.fixture
def two_workers(monkeypatch):
    """Returns a function that sets whether two workers with equal callbacks share a filesystem."""
    monkeypatch.setattr(backups.strategies, "process_count", lambda strategy: 2)
    monkeypatch.setattr(backups.agreement, "gather_texts", lambda strategy, what, own: [own, own])

    def use(same_files):
        found = [0, 0] if same_files else [0, 1]
        monkeypatch.setattr(backups, "leaders", lambda *args: found)

    return use


@loop("kind", KINDS)
def test_shared_backup_path_raises(two_workers, tmp_path, kind):
    callback = KINDS[kind](str(tmp_path))
    two_workers(same_files=True)
    with pytest.raises(ValueError, match=f"workers 0, 1 would write.*`{kind.split()[0]}`") as error:
        backups.check(Model, [keras.callbacks.History(), callback], "begin")
    assert f"Received: {tmp_path}" in str(error.value)
    two_workers(same_files=False)
    backups.check(Model, [callback], "begin")


@loop("name", ["{epoch}-rank%d.keras", "{epoch}/rank%d.keras"])
def test_paths_that_differ_anywhere_are_accepted(monkeypatch, two_workers, tmp_path, name):
    two_workers(same_files=True)
    own, other = (keras.callbacks.ModelCheckpoint(f"{tmp_path}/{name % rank}") for rank in (0, 1))
    both = [json.dumps(backups._entry(callback)) for callback in (own, other)]
    monkeypatch.setattr(backups.agreement, "gather_texts", lambda strategy, what, own: both)
    backups.check(Model, [own], "begin")
