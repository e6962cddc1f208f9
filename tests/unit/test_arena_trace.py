import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from qwisp.arena.trace import TraceWriter, read_trace
from qwisp.errors import TraceError
from tests.tree import ROOT

STEPS = [
    (0, "prefill", [[1, 2, 3], [3, 4, 250], [9, 0, 7]]),
    (7, "prefill", [[1, 2, 3], [3, 4, 5], [9, 0, 7]]),
    (0, "decode", [[5, 6, 8]]),
    (7, "decode", []),
]


def write(path, steps=STEPS, num_experts=256):
    with TraceWriter.create(
        path, fingerprint="abc", num_experts=num_experts, top_k=3, layers=[0, 7]
    ) as trace:
        for layer, kind, routes in steps:
            trace.record(layer, kind, np.array(routes, dtype=np.int64).reshape(-1, 3))
    return path.read_bytes()


def plain(trace):
    return [(step.layer, step.kind, step.routes.tolist()) for step in trace]


@pytest.mark.parametrize(("num_experts", "id_nbytes"), [(256, 1), (257, 2), (65536, 2)])
def test_what_is_recorded_is_read_back(tmp_path, num_experts, id_nbytes):
    path = tmp_path / "routes.trace"
    steps = [*STEPS, (7, "decode", [[num_experts - 1, 0, 1]])]
    data = write(path, steps, num_experts)
    trace = read_trace(path)
    assert plain(trace) == steps
    assert len(trace) == len(steps)
    assert trace.is_complete
    assert (trace.header.fingerprint, trace.header.layers) == ("abc", (0, 7))
    assert len(data) - data.index(b"\n") - 1 == 6 * 11 + 8 * 3 * id_nbytes


def test_every_cut_off_file_is_refused_and_says_how_much_is_whole(tmp_path):
    path = tmp_path / "routes.trace"
    data = write(path)
    start = data.index(b"\n") + 1
    sizes = [11 + 3 * len(routes) for _, _, routes in STEPS]
    for length in range(start, len(data)):
        path.write_bytes(data[:length])
        num_whole = sum(length >= start + sum(sizes[: n + 1]) for n in range(len(sizes)))
        with pytest.raises(TraceError, match=rf"routes\.trace: cut off in record {num_whole}\b"):
            read_trace(path)
        rest = read_trace(path, allow_truncated=True)
        assert not rest.is_complete
        assert plain(rest) == STEPS[:num_whole]


def test_every_flipped_bit_of_a_record_is_refused(tmp_path):
    path = tmp_path / "routes.trace"
    data = write(path)
    start = data.index(b"\n") + 1
    for position in range(start, len(data)):
        for bit in (0, 7):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            with pytest.raises(TraceError, match=r"routes\.trace"):
                read_trace(path)


def test_a_crash_loses_only_what_was_not_flushed(tmp_path):
    path = tmp_path / "routes.trace"
    script = """
import os, sys
from pathlib import Path
import numpy as np
from qwisp.arena.trace import TraceWriter
trace = TraceWriter.create(Path(sys.argv[1]), fingerprint="", num_experts=8, top_k=1, layers=[0])
for expert in range(8):
    trace.record(0, "decode", np.array([[expert]]))
    if expert == 4:
        trace.flush()
os._exit(1)
"""
    subprocess.run([sys.executable, "-c", script, str(path)], cwd=ROOT, check=False)
    with pytest.raises(TraceError, match="5 whole records"):
        read_trace(path)
    assert [s.routes.item() for s in read_trace(path, allow_truncated=True)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a qwisp trace"),
        (b"\x93NUMPY" + bytes(100), "not a qwisp trace"),
        (b'{"magic": "other"}\n', "not a qwisp trace"),
        (b'{"magic": "qwisp-trace"\n', "header cannot be used"),
        (b'{"magic": "qwisp-trace", "version": 1}\n', "header cannot be used"),
    ],
)
def test_a_foreign_file_is_refused_by_name(tmp_path, content, reason):
    path = tmp_path / "other.bin"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=rf"other\.bin: .*{reason}"):
        read_trace(path)


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "routes.trace"
    path.write_bytes(write(path).replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(TraceError, match="version"):
        read_trace(path)


def test_a_record_that_was_taken_out_is_missed(tmp_path):
    path = tmp_path / "routes.trace"
    data = write(path)
    start = data.index(b"\n") + 1
    path.write_bytes(data[:start] + data[start + 11 + 9 :])
    with pytest.raises(TraceError, match="the end counts 4 records, 3 are there"):
        read_trace(path)


def test_bytes_after_the_end_are_refused(tmp_path):
    path = tmp_path / "routes.trace"
    path.write_bytes(write(path) + b"x")
    with pytest.raises(TraceError, match="1 bytes after the end"):
        read_trace(path)


@pytest.mark.parametrize("steps", [[(3, "decode", [[1, 2, 3]])], [(0, "decode", [[1, 2, 8]])]])
def test_a_layer_or_expert_that_the_header_excludes_is_refused(tmp_path, steps):
    path = tmp_path / "routes.trace"
    write(path, steps, num_experts=8)
    with pytest.raises(TraceError, match="corrupt record 0"):
        read_trace(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(TraceError, match=r"none\.trace"):
        read_trace(tmp_path / "none.trace")


def test_an_unwritable_place_is_refused_by_name(tmp_path):
    with pytest.raises(TraceError, match=r"no_folder"):
        write(tmp_path / "no_folder" / "routes.trace")


def test_routes_of_another_top_k_are_refused(tmp_path):
    path = tmp_path / "routes.trace"
    with (
        TraceWriter.create(path, fingerprint="", num_experts=8, top_k=3, layers=[0]) as trace,
        pytest.raises(TraceError, match=r"shape \(2, 2\)"),
    ):
        trace.record(0, "decode", np.zeros((2, 2), dtype=np.int32))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_is_reported_by_name(tmp_path):
    path = tmp_path / "routes.trace"
    path.symlink_to("/dev/full")
    trace = TraceWriter.create(path, fingerprint="", num_experts=8, top_k=3, layers=[0])
    with pytest.raises(TraceError, match=os.strerror(errno.ENOSPC)):
        trace.close()
    trace.close()


def test_closing_twice_writes_one_end(tmp_path):
    path = tmp_path / "routes.trace"
    trace = TraceWriter.create(path, fingerprint="", num_experts=8, top_k=3, layers=[0])
    trace.close()
    trace.close()
    assert len(read_trace(path)) == 0
