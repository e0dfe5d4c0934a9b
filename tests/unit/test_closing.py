"""An error that leaves `fit` closes the library's callbacks."""

import pytest

from tf_redsync.keras import closing

MODEL, OTHER = object(), object()


class Part:
    """A callback that notes its end in `told`."""

    def __init__(self, name, told, model=MODEL, error=None):
        self.name, self.told, self.model, self.error = name, told, model, error
        closing.register(self)

    def close(self):
        closing.unregister(self)
        self.told.append(self.name)
        if self.error:
            raise self.error


def test_an_inner_error_closes_what_its_context_has_opened_of_its_model():
    told = []
    with pytest.raises(KeyboardInterrupt), closing.closing_on_error(MODEL):
        Part("outer", told)
        with pytest.raises(ValueError), closing.closing_on_error(MODEL):
            Part("inner", told)
            elsewhere = Part("of another model", told, OTHER)
            raise ValueError
        assert told == ["inner"]
        raise KeyboardInterrupt
    assert told == ["inner", "outer"]
    with closing.closing_on_error(OTHER):
        pass  # without an error `on_train_end` closes it
    assert told == ["inner", "outer"]
    elsewhere.close()


def test_one_that_cannot_be_closed_does_not_keep_the_others_open():
    told = []
    with pytest.raises(OSError, match="disk full"), closing.closing_on_error(MODEL):
        Part("first", told)
        Part("second", told, error=OSError("disk full"))
        raise ValueError
    assert told == ["second", "first"]
