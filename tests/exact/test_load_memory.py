"""Loading never holds the experts: peak memory stays near the resident weights and the arena."""

import json
import subprocess
import sys
from pathlib import Path

from tests.synthetic import make_big_checkpoint

CAPACITY = 8

# A subprocess of its own, since peak memory of a process never goes down. The baseline imports all
# that a load imports (transformers comes lazily) and computes nothing.
PROBE = """
import json, resource, sys, threading
import qwisp, mlx.core, numpy
from qwisp.engine.tokenizer import Tokenizer
from transformers import AutoTokenizer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
engine = qwisp.Engine.load(sys.argv[1], qwisp.EngineConfig(capacity=int(sys.argv[2])))
plan = engine.plan
print(json.dumps({"grown": peak() - before, "resident": plan.resident_bytes,
                  "arena": plan.arena_bytes, "experts": plan.arena_bytes // plan.capacity *
                  plan.num_experts}))
engine.close()
"""


def test_peak_memory_of_load_is_near_resident_weights_and_arena(tmp_path: Path) -> None:
    folder = make_big_checkpoint(tmp_path / "big")
    probe = subprocess.run(
        [sys.executable, "-c", PROBE, str(folder), str(CAPACITY)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(probe.stdout.splitlines()[-1])
    assert found["experts"] >= 500_000_000
    limit = 1.1 * (found["resident"] + found["arena"]) + 32e6
    assert found["grown"] < limit, f"{found}: limit {limit:.0f}"
    print(f"{found}, limit {limit:.0f}")
