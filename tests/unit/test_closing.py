"""`fit` closes the library's callbacks if it raises."""

import pytest

from tf_redsync.keras import closing

MODEL, OTHER = object(), object()


class RecordingCallback:
    """A callback that appends its name to `closed` when it is closed."""

    def __init__(self, name, closed, model=MODEL, error=None):
        self.name, self.closed, self.model, self.error = name, closed, model, error
        closing.register(self)

    def close(self):
        closing.unregister(self)
        self.closed.append(self.name)
        if self.error:
            raise self.error


def test_inner_error_closes_callbacks_of_its_own_model():
    closed = []
    with pytest.raises(KeyboardInterrupt), closing.closing_on_error(MODEL):
        RecordingCallback("outer", closed)
        with pytest.raises(ValueError), closing.closing_on_error(MODEL):
            RecordingCallback("inner", closed)
            elsewhere = RecordingCallback("of another model", closed, OTHER)
            raise ValueError
        assert closed == ["inner"]
        raise KeyboardInterrupt
    assert closed == ["inner", "outer"]
    with closing.closing_on_error(OTHER):
        pass  # without an error `on_train_end` closes it
    assert closed == ["inner", "outer"]
    elsewhere.close()


def test_error_in_close_does_not_keep_others_open():
    closed = []
    with pytest.raises(OSError, match="disk full"), closing.closing_on_error(MODEL):
        RecordingCallback("first", closed)
        RecordingCallback("second", closed, error=OSError("disk full"))
        raise ValueError
    assert closed == ["second", "first"]
