"""Mutants of the shipped configs, and of data sets, are refused with an InputError or are valid.

scripts/fuzz_configs.py and scripts/fuzz_data.py make them.
"""

import pytest
from test_scripts import load


def outcome(count, seed):
    # the limit is there to end what hangs; the script's own is a second
    return load("fuzz_configs").run(count, seed, seconds=30.0)


def test_mutants_are_refused_or_valid():
    found = outcome(80, seed=1)
    assert found["faults"] == []
    assert found["refused"] > 40 and found["valid"] > 4


def test_the_fuzz_finds_what_is_raw_or_slow(monkeypatch):
    fuzz = load("fuzz_configs")

    def with_a_load(fn):
        calls = []

        def once(*args, **options):
            calls.append(1)
            return fn() if len(calls) > len(fuzz.SOURCES) else None

        monkeypatch.setattr(fuzz.config, "load", once)
        return fuzz.run(1, seconds=0.2)["faults"]

    def forever():
        while True:
            pass

    def raw():
        raise KeyError("x")

    assert "KeyError" in with_a_load(raw)[0]
    assert "TooSlow" in with_a_load(forever)[0]


@pytest.mark.slow
def test_ten_thousand_mutants():
    assert outcome(10_000, seed=0)["faults"] == []


# ---------------------------------------------------------------- data sets


def test_damaged_data_sets_are_read_or_refused():
    found = load("fuzz_data").run(40, seed=1)
    assert found["faults"] == []
    assert found["refused"] > 15 and found["read"] > 2


@pytest.mark.slow
def test_five_thousand_damaged_data_sets():
    tell = lambda line: None
    assert load("fuzz_data").watched(5000, 0, first=0, seconds=10.0, tell=tell)["faults"] == []
