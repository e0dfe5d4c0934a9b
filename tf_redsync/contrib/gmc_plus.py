"""GMC+: global momentum compression with detached error feedback."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from typing_extensions import override

from tf_redsync import checks
from tf_redsync.config import register
from tf_redsync.exchange.capabilities import EvaluationPoint
from tf_redsync.exchange.method import State
from tf_redsync.exchange.sync_schedule import SyncSchedule
from tf_redsync.methods.gmc import GMC


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class GMCPlus(EvaluationPoint, GMC):
    """GMC+: GMC with detached error feedback, which shifts the point of the gradient.

    During training, each worker has its own weights. The workers return to the common weights when
    an epoch ends and before an evaluation or a save. In a custom loop call
    `optimizer.exchange.to_consensus()`.

    Chang-Wei Shi, Shen-Yi Zhao, Yin-Peng Xie, Hao Gao, Wu-Jun Li (2019), "Global Momentum
    Compression for Sparse Communication in Distributed Learning", arXiv 1905.12948 (GMC+). The
    default lambda = 0.3 is from An Xu, Heng Huang (2021), "Detached Error Feedback for Distributed
    SGD with Random Sparsification", arXiv 2004.05298.

    It is `GMC`, but each worker computes its gradients at the weights after a step along a part of
    its residual. With learning rate eta, K workers, weights w, residual e and momentum beta:

        a <- e + eta g(w - lambda e) + beta d   0 < lambda < 1;  GMC: lambda = 0;  d: last update
        c <- C(a)                               top-k, or a random block that all workers share
        e <- a - c
        d <- mean over workers of c,  w <- w - d

    The weights w, which are equal on all workers, are those to evaluate and to save.

    Differences from the paper

    * Residual and momentum are in units of gradients. In the paper, and in Keras's SGD, they are in
      units of updates. Both forms are equal while the learning rate is constant. If it changes from
      eta to eta', residual and momentum scale by eta' / eta here; in the paper they keep their
      size.
    * The inner optimizer applies weight decay, outside of the residual.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        momentum: beta, in [0, 1). The inner optimizer must then have none.
        selection: `"top_k"`, or `"random_block"`: a block of consecutive elements, equal on all
            workers.
        detached: lambda, in [0, 1): the part of the residual that shifts the point. 0 is GMC.
        seed: Seed of the blocks; the same on all workers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely, with the same momentum.

    Raises:
        ValueError: If an argument is out of range; the message names it.
    """

    detached: float = 0.3

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        checks.real("detached", self.detached, low=0.0, high=1.0, high_open=True)

    @property
    @override
    def sync_schedule(self) -> SyncSchedule:
        return SyncSchedule(own_point=True)

    @override
    def point(
        self,
        weights: list[tf.Tensor],
        grads: list[tf.Tensor],
        state: State,
        rate: tf.Tensor,
        workers: int,
    ) -> list[tf.Tensor]:
        """Return `w - lambda e` with the residual in updates, `e = rate K v`."""
        del grads
        factor = self.detached * rate * workers
        return [w - factor * v for w, v in zip(weights, state["residual"], strict=True)]
