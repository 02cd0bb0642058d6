"""Marker of tests that are about a fast substitute itself."""

from __future__ import annotations

import pytest

from dave_vit.engine import fast

needs_fast = pytest.mark.skipif(not fast.is_enabled(), reason="DAVE_FAST=0 switches fast substitutes off")
