"""Errors are part of the interface: tests compare the whole message."""

import re
from contextlib import AbstractContextManager

import pytest

import spiritlevel as sl


def refused(message: str, error: type[Exception] = sl.SpiritLevelError) -> AbstractContextManager:
    """Expects this error with exactly this message."""
    return pytest.raises(error, match=rf"\A{re.escape(message)}\Z")
