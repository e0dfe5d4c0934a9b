"""Reports of the uncaught error that ends a worker's program."""

import sys

import pytest

from tf_redsync.cluster import watchdog


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad batch\nmore"), "ValueError: bad batch"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (None, ""),
    ],
)
def test_uncaught_error_is_reported(monkeypatch, error, text):
    for name in ("last_exc", "last_value"):
        monkeypatch.setattr(sys, name, error, raising=False)
    reports = [watchdog._Process().report(ended) for ended in (True, False)]
    assert [report.error for report in reports] == [text, ""]


def test_interactive_session_continues_after_an_error(monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError("bad batch"), raising=False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert watchdog._Process().report(True).error == ""
