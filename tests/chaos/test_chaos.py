"""The most severe failures in one job and its restart; `--deep` runs all scenarios."""

import random

import pytest

from tests.chaos import __main__ as chaos
from tests.chaos import together
from tests.chaos.bench import SCENARIOS, Bench
from tests.chaos.network import spoiled

pytestmark = pytest.mark.distributed


@pytest.fixture
def bench(tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown if the test fails
    return Bench(seed, tmp_path)


def test_job_survives_bad_day(bench):
    together.bad_day(bench)


@pytest.mark.deep  # 50 minutes
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in chaos.SHORT])
def test_scenario_has_expected_outcome(name, bench):
    scenario = SCENARIOS[name]
    if scenario.missing():
        pytest.skip(scenario.missing())
    scenario.run(bench)


def test_table_lists_scenarios_not_played():
    note = {"passed": False, "happened": "a | b", "found": 1.26, "by": "", "lost": ""}
    lines = chaos.table([{"name": "late", **note}]).splitlines()
    (late,) = [line for line in lines if line.startswith("| A late worker")]
    assert "**NOT AS IT MUST BE:** a \\| b | 1.3 s |" in late
    assert sum("| not played |" in line for line in lines) == len(SCENARIOS) - 1


def checksum(segment):
    words = [int.from_bytes(segment[i : i + 2], "big") for i in range(0, len(segment), 2)]
    total = sum(words)
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def test_corrupted_packet_keeps_checksum():
    payload = random.Random(0).randbytes(1000)
    ip = bytes([0x45, *([0] * 8), 6, *([0] * 10)])
    frame = bytes(14) + ip + bytes([*([0] * 12), 0x50, *([0] * 7)]) + payload
    changed = spoiled(frame)
    assert len(changed) == len(frame) and changed[:54] == frame[:54]
    assert sum(a != b for a, b in zip(frame, changed, strict=True)) == 2
    assert checksum(changed[34:]) == checksum(frame[34:])
