"""Traces are read as they are published, row by row, and errors name the row."""

from __future__ import annotations

import gzip
import json
import lzma

import numpy as np
import pytest

from kvpool import ArgumentError
from kvpool.sim.traces import open_trace


def written(tmp_path, lines, name="trace"):
    file = tmp_path / name
    file.write_text("\n".join(lines) + "\n")
    return file


def mooncake(time_ms, length, ids, output=5):
    return json.dumps({"timestamp": time_ms, "input_length": length, "output_length": output, "hash_ids": ids})


AZURE = ["TIMESTAMP,ContextTokens,GeneratedTokens"]


def test_mooncake(tmp_path):
    rows = [mooncake(1000, 1000, [7, 8]), mooncake(3500, 1500, [7, 8, 9]), mooncake(3500, 1025, [7, 8, 10])]
    trace = open_trace(written(tmp_path, rows))
    assert trace.block_tokens == 512
    requests = list(trace.start())
    assert [request.time_s for request in requests] == [0.0, 2.5, 2.5]
    assert [request.ids.tolist() for request in requests] == [[7, 8], [7, 8, 9], [7, 8, 10]]
    assert [(request.prompt, request.output) for request in requests] == [(1000, 5), (1500, 5), (1025, 5)]
    assert [request.time_s for request in open_trace(written(tmp_path, rows), rate_scale=2.0).start()][1] == 1.25
    assert len(list(open_trace(written(tmp_path, rows), limit=2).start())) == 2


@pytest.mark.parametrize("opener", [lzma.open, gzip.open])
def test_compressed_files_are_recognised_by_their_content(tmp_path, opener):
    file = tmp_path / "trace.whatever"
    with opener(file, "wt") as lines:
        lines.write(mooncake(0, 16, [1]) + "\n")
    assert len(list(open_trace(file).start())) == 1


def test_azure_with_its_many_digits_and_zones(tmp_path):
    stamps = ["2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50", "2023-11-16 18:15:50.5+00:00"]
    rows = [f"{stamp},{100 + at},{at}" for at, stamp in enumerate(stamps)]
    requests = list(open_trace(written(tmp_path, AZURE + rows)).start())
    assert [request.time_s for request in requests] == pytest.approx([0.0, 3.31941, 3.81941])
    assert [request.output for request in requests] == [1, 1, 2]  # an answer has one token at least
    ids = np.concatenate([request.ids for request in requests])
    assert len(set(ids.tolist())) == len(ids) == 3 * 7  # nothing is shared


def test_vidur_has_no_times_or_has_them(tmp_path):
    header = ["num_prefill_tokens,num_decode_tokens"]
    file = written(tmp_path, [*header, "100,10", "200,20"])
    with pytest.raises(ArgumentError, match="give a rate"):
        open_trace(file)
    times = [request.time_s for request in open_trace(file, rate=2.0, seed=1).start()]
    assert 0 < times[0] < times[1]
    assert times == [request.time_s for request in open_trace(file, rate=2.0, seed=1).start()]
    assert times != [request.time_s for request in open_trace(file, rate=2.0, seed=2).start()]
    timed = written(tmp_path, ["arrived_at,num_prefill_tokens,num_decode_tokens", "1.5,100,10", "2.0,200,20"], "b")
    assert [request.time_s for request in open_trace(timed).start()] == [0.0, 0.5]


def test_rows_a_little_out_of_order_are_sorted_and_far_out_of_order_refused(tmp_path):
    rows = [mooncake(time, 16, [1]) for time in (0, 3000, 1000, 2000)]
    assert [request.time_s for request in open_trace(written(tmp_path, rows)).start()] == [0.0, 1.0, 2.0, 3.0]
    rows = [mooncake(time, 16, [1]) for time in (*range(5000, 12000), 10)]
    with pytest.raises(ArgumentError, match="sort the trace"):
        list(open_trace(written(tmp_path, rows)).start())


def test_hashes_of_64_bits(tmp_path):
    rows = [mooncake(0, 32, [2**63 + 5, 2**40 + 7]), mooncake(0, 32, [2**63 + 5, 2**40 + 8])]
    first, second = (request.ids.tolist() for request in open_trace(written(tmp_path, rows), block_tokens=16).start())
    assert first[0] == second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no requests"),
        (["a,b,c", "1,2,3"], "no known format"),
        (AZURE, "no requests"),
        ([*AZURE, "2023-11-16 18:15:46,5,5", "yesterday,5,5"], "row 3 is no request"),
        ([*AZURE, "2023-11-16 18:15:46,-5,5"], "row 2 is no request: a length"),
        ([*AZURE, "2023-11-16 18:15:46"], "row 2 is no request: it has 1 of 3 fields"),
        *(([mooncake(0, 16, [1]), row], "row 2 is no request: it is no JSON object") for row in ("[1]", "7", "null")),
        ([mooncake(0, 16, [1]), mooncake(0, 10**400, [1])], "row 2 is no request"),
        ([mooncake(0, 16, [1]), mooncake(10**400, 16, [1])], "row 2 is no request"),
        ([mooncake(0, 16, [1], output=True)], "row 1 is no request: a length of True"),
        (
            [mooncake(0, 1024, [1, 2])] * 300 + [mooncake(1, 9, [1, 2])],
            "2 hash ids for 9 tokens, which are 1 block of 512",
        ),
        (['{"timestamp": 1}'], "no 'input_length' in it"),
        (["{not json"], "row 1 is no request"),
        (['{"input_length": 5, "output_length": 5, "timestamp": 0, "hash_ids": "x"}'], "hash_ids"),
        ([mooncake(0, 1000, [1] * 7), mooncake(0, 1000, [1] * 70)], "give block_tokens"),
        ([mooncake(0, 16, [-1])], "row 1: hash id -1 is no whole number"),
        ([mooncake(0, 16, [1]), mooncake(0, 16, [1.5])], "row 2: hash id 1.5 is no whole number"),
        ([mooncake(0, 16, [True])], "row 1: hash id True is no whole number"),
        ([mooncake(0, 16, [1]), mooncake(float("nan"), 16, [1])], "row 2: its arrival time is nan"),
        ([mooncake(float("inf"), 16, [1])], "row 1: its arrival time is inf"),
        ([mooncake(0, 16, [1]), mooncake(1, 16, None)], "row 2: it has no hash_ids, and the first row has one"),
        ([mooncake(0, 16, None), mooncake(1, 16, [1])], "row 2: it has a hash_ids, and the first row has none"),
        ([mooncake(0, 512, [1]), mooncake(1, 1024, [1, 2]), mooncake(2, 9000, [1])], "give block_tokens"),
        (
            [*[mooncake(0, 1024, [1, 2])] * 300, mooncake(1, 9000, [1])],
            "row 301: 1 hash id for 9000 tokens",
        ),
        ([mooncake(0, float("nan"), [1])], "row 1 is no request"),
    ],
)
def test_an_error_in_a_trace_is_named(tmp_path, lines, message):
    with pytest.raises(ArgumentError, match=message):
        list(open_trace(written(tmp_path, lines)).start())


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(ArgumentError, match="cannot be read"):
        open_trace(tmp_path / "nothing")
    (tmp_path / "broken.xz").write_bytes(lzma.compress(b'{"a": 1}')[:-20])
    with pytest.raises(ArgumentError, match="cannot be read"):
        open_trace(tmp_path / "broken.xz")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(ArgumentError):
        open_trace(tmp_path / "binary")
    for options in ({"rate": 0.0}, {"rate_scale": 0.0}, {"limit": 0}):
        with pytest.raises(ArgumentError):
            open_trace(written(tmp_path, [mooncake(0, 16, [1])]), **options)


def test_the_published_traces_are_read_as_described(traces):
    found = {
        path.name: (trace.block_tokens, sum(1 for _ in trace.start()))
        for path in sorted(traces.glob("*[lv].xz"))
        for trace in [open_trace(path, rate=1.0)]
    }
    assert found["mooncake_conversation_trace.jsonl.xz"] == (512, 12_031)
    assert found["derived_react_hotpotqa_blk16.jsonl.xz"] == (16, 1_867)
    assert found["azure2023_conv.csv.xz"] == (16, 19_366)
    assert found["vidur_arxiv_summ.csv.xz"] == (16, 28_257)
