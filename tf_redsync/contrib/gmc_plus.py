"""GMC with detached error feedback."""

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
    """GMC with detached error feedback: gradients are computed at a point of the worker's own.

    Chang-Wei Shi, Shen-Yi Zhao, Yin-Peng Xie, Hao Gao, Wu-Jun Li (2019), "Global Momentum
    Compression for Sparse Communication in Distributed Learning", arXiv 1905.12948 (GMC+). An Xu,
    Heng Huang (2021), "Detached Error Feedback for Distributed SGD with Random Sparsification",
    arXiv 2004.05298; lambda = 0.3 is theirs.

    As `GMC`, but each worker computes its gradients where it would be if a part of its residual had
    been applied. With learning rate eta, K workers, weights w, residual e and momentum beta:

        a <- e + eta g(w - lambda e) + beta before          0 < lambda < 1;  GMC: lambda = 0
        c <- C(a)                               top-k, or a random block that all workers share
        e <- a - c
        before <- mean over workers of c,  w <- w - before

    The weights w, on which all agree, are those to evaluate and to save.

    Differences from the paper

    * The two forms are the same as long as the learning rate is constant. If it changes from eta to
      eta', residual and momentum shrink by eta' / eta here, as in SGD with a momentum of gradients;
      in the paper's form they keep the size of the old rate.
    * Weight decay is the inner optimizer's, outside of the residual.

    Args:
        density: Fraction of the elements that is sent, in (0, 1].
        momentum: beta, in [0, 1). The inner optimizer must then have none.
        selection: `"top_k"`, or `"random_block"`: the same elements in a row on all workers.
        detached: lambda, in [0, 1): how far a worker goes along its residual. 0 is GMC.
        seed: Of the blocks; the same on all workers.
        dense_below: Tensors of fewer float32 bytes are all-reduced densely, with the same momentum.

    Raises:
        ValueError: for a hyper-parameter out of its range.
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
