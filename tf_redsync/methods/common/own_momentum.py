"""What methods with momentum in the exchange tell about it."""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from tf_redsync.exchange.method import Method
from tf_redsync.exchange.traits import Traits


class OwnMomentum(Method):
    """A method with a `momentum`, in place of the inner optimizer's where it is not 0."""

    momentum: float

    @property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(
            super().traits,
            # Momentum adds its own mass
            conserves=self.momentum == 0.0,
            momentum_in_exchange=self.momentum,
        )
