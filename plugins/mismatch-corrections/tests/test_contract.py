"""The contract suite of corrections, for every component and for each way in which it is used."""

from __future__ import annotations

import miles_mismatch_corrections
from miles_core.testing.contracts import CorrectionContract

COMPONENTS = {c.name: c for c in miles_mismatch_corrections.miles_corrections()}


class TestTis(CorrectionContract):
    component = COMPONENTS["tis"]


class TestTisClipped(CorrectionContract):
    component = COMPONENTS["tis"]
    options = {"lower": 0.5, "upper": 1.5}


class TestTisOfSequences(CorrectionContract):
    component = COMPONENTS["tis"]
    options = {"level": "sequence"}


class TestTisOfGeometricMeans(CorrectionContract):
    component = COMPONENTS["tis"]
    options = {"level": "geometric"}


class TestMis(CorrectionContract):
    component = COMPONENTS["mis"]


class TestMisOfTokens(CorrectionContract):
    component = COMPONENTS["mis"]
    options = {"level": "token", "lower": 0.5}


class TestMisOfGeometricMeans(CorrectionContract):
    component = COMPONENTS["mis"]
    options = {"level": "geometric", "lower": 0.99, "upper": 1.01}


class TestIcepop(CorrectionContract):
    component = COMPONENTS["icepop"]


class TestRejection(CorrectionContract):
    component = COMPONENTS["rejection"]


class TestRejectionOfTokens(CorrectionContract):
    component = COMPONENTS["rejection"]
    options = {"level": "token", "veto": 0.0}


class TestOpsm(CorrectionContract):
    component = COMPONENTS["opsm"]
    options = {"delta": 0.1}
