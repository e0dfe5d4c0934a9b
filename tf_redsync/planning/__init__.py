"""The dry run behind `python -m tf_redsync plan`: model, prediction, report, picture."""


class PlanError(ValueError):
    """What is asked for cannot be planned; the message says what to do."""
