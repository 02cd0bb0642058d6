"""Old spellings still work, and say the new one."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest

NAMES = """EFFECTIVE OFFICIAL_GATE PLAIN Call Gradient Interception Rule RuleSet Target attention_matrix carry
conservation_gap effective_transformation gradient resolve_target""".split()


@pytest.fixture
def effective(monkeypatch):
    monkeypatch.delitem(sys.modules, "dave_vit.effective", raising=False)
    return importlib.import_module("dave_vit.effective")


@pytest.mark.parametrize("name", NAMES)
def test_names_of_effective_warn_once(effective, name):
    with pytest.warns(DeprecationWarning, match=rf"dave_vit\.effective\.{name} is now dave_vit\.\w+\.{name}") as caught:
        value = getattr(effective, name)
    home = str(caught[0].message).split()[-1].rpartition(".")[0]
    assert value is getattr(importlib.import_module(home), name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(effective, name) is value


def test_there_are_no_other_names(effective):
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = effective.no_such_name
