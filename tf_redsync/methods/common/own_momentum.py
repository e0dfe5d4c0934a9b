"""What methods with momentum in the exchange tell about it."""

from __future__ import annotations

from typing_extensions import override

from tf_redsync.exchange.method import Method


class OwnMomentum(Method):
    """A method with a `momentum`, in place of the inner optimizer's where it is not 0."""

    momentum: float

    @property
    @override
    def conserves(self) -> bool:
        """Momentum adds its own mass."""
        return self.momentum == 0.0

    @property
    @override
    def momentum_in_exchange(self) -> float:
        return self.momentum
