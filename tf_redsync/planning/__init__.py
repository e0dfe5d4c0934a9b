"""Predictions of `tf-redsync plan`: subject, prediction, report, proposals."""


class PlanError(ValueError):
    """A plan cannot be made; the message has the argument and the remedy."""
