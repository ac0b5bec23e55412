"""ElasticBuffer with NumPy on the CPU backend: rows, handles and sums of random steps, against loops."""

import numpy as np
import pytest

import ferry
import ferry.deep_ep as deep_ep
from deep_ep_steps import fp8
from elastic_steps import POISON, expected_metadata, expected_of, expected_sum, outputs_of, poisoned, skewed_step
from ferry.deep_ep import _arrays
from node_ranks import TRANSPORTS, name_of
from oracle import bf16, experts_of, messages_to, same_bits

CASES = 12
ONE_NODE = [("shared memory", [0] * ranks) for ranks in (1, 2, 4)]
NODES = [("shared memory", [0, 0, 1, 1]), ("functions", [0, 1, 0, 1]), ("functions", [0, 0, 0, 1, 1]), ("functions", [0, 1])]


@pytest.fixture(autouse=True)
def poison_new_arrays(monkeypatch):
    monkeypatch.setattr(_arrays.NumpyArrays, "empty", lambda self, shape, name, like=None: poisoned(shape, self.type(name)))


def on_nodes(case, body, **settings):
    """Calls body(rank's number, an ElasticBuffer) as every rank. `case`: a transport of node_ranks, and the node of each rank."""
    transport, node_of_rank = case
    settings = {"num_max_tokens_per_rank": 16, "explicitly_destroy": True, "num_gpu_timeout_secs": 20} | settings
    TRANSPORTS[transport](node_of_rank, lambda rank: body(rank.index, deep_ep.ElasticBuffer(rank, **settings)))


def on_ranks(ranks, body, **settings):
    on_nodes(("shared memory", [0] * ranks), body, **settings)


def random_case(rng, ranks):
    top_k = int(rng.integers(1, 6))
    experts = int(rng.integers(max(1, top_k), 13)) if rng.integers(3) == 0 else ranks * int(rng.integers(-(-top_k // ranks), 7))
    step = skewed_step(rng, ranks, experts, top_k, hidden=32 * int(rng.integers(1, 4)), most=int(rng.integers(0, 17)))
    expand, sync = bool(rng.integers(2)), bool(rng.integers(2))
    settings = {"num_experts": experts, "num_max_tokens_per_rank": 16 + int(rng.integers(0, 3)), "do_expand": expand,
                "expert_alignment": int(rng.choice([1, 1, 4, 6, 16])), "do_cpu_sync": sync}
    return step, settings, bool(rng.integers(2)), bool(rng.integers(2))


def quantised(step, rng):
    """fp8 values and scales, an odd number of them a row, with strides of columns."""
    scales = [int(rng.choice([1, 3, 4])), [np.float32, np.int32][rng.integers(2)]]
    return [(rng.integers(0, 255, x.shape).astype(np.uint8).view(fp8),
             np.asfortranarray((rng.random((len(x), scales[0])) * 1000).astype(scales[1]))) for x in step.tokens]


def check_rows(received, sent, rows, columns_of_scales=False):
    """Compares received rows, and scales, with the tokens of all ranks. Rows that no token has may hold anything."""
    if isinstance(received, tuple):
        values, scales = received
        assert scales.dtype == sent[0][1].dtype and scales.shape == (len(values), sent[0][1].shape[1])
        if columns_of_scales and scales.size:
            assert [s // scales.itemsize for s in scales.strides] == [1, -(-len(values) // 4) * 4]
        else:
            assert scales.flags.c_contiguous
        check_rows(values, [x for x, _ in sent], rows)
        check_rows(scales, [s for _, s in sent], rows)
        return
    assert received.dtype == sent[0].dtype
    for row, source in enumerate(rows):
        if source is not None:
            assert same_bits(received[row], sent[source[0]][source[1]])


@pytest.mark.parametrize("case", ONE_NODE + NODES, ids=name_of)
def test_random_steps(rng, case):
    cases = [random_case(rng, len(case[1])) for _ in range(CASES)]
    inputs = [quantised(step, rng) if in_fp8 else step.tokens for step, _, in_fp8, _ in cases]

    def body(me, buffer):
        for (step, settings, in_fp8, weighted), sent in zip(cases, inputs):
            check_step(me, buffer, step, settings, sent, weighted)
        buffer.destroy()

    on_nodes(case, body)


def check_step(me, buffer, step, settings, sent, weighted):
    expand, sync, alignment = settings["do_expand"], settings["do_cpu_sync"], settings["expert_alignment"]
    expected = expected_of(step, me, expand, alignment)
    received = len(messages_to(step, me))
    stats = np.full(len(expected.counts), 100, np.int32)
    columns = bool(alignment % 2)
    given = {"topk_weights": step.weights[me] if weighted else None, "use_tma_aligned_col_major_sf": columns}
    recv_x, ids, weights, handle, event = buffer.dispatch(
        sent[me], step.ids[me], cumulative_local_expert_recv_stats=stats, **given, **settings)
    assert event.event is None
    values = recv_x[0] if isinstance(recv_x, tuple) else recv_x
    most, local = settings["num_max_tokens_per_rank"], len(expected.counts)
    if sync:
        length = len(expected.rows)
    elif expand:
        length = -(-(step.ranks * most * min(step.top_k, local) + (alignment - 1) * local) // alignment) * alignment
    else:
        length = step.ranks * most
    assert len(values) == length
    check_rows(recv_x, sent, expected.rows, columns)
    check_routes(me, step, expand, expected.rows, ids, weights, weighted)
    if ids is not None:
        assert (ids[received:] == -1).all() and ids.shape == (length, step.top_k)
    assert stats.tolist() == [100 + count for count in expected.counts]

    assert (handle.do_expand, handle.num_experts, handle.expert_alignment) == (expand, step.experts, alignment)
    assert handle.num_max_tokens_per_rank == most and handle.num_sms == buffer.get_theoretical_num_sms(step.experts, step.top_k)
    assert same_bits(handle.topk_idx, step.ids[me]) and not np.shares_memory(handle.topk_idx, step.ids[me])
    assert handle.num_recv_tokens_per_expert_list == (expected.aligned if sync else [])
    assert handle.num_recv_tokens == (received if sync else step.ranks * most)
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == expected.counts
    assert handle.psum_num_recv_tokens_per_expert.tolist() == expected.ends
    by_rank = [sum(source <= rank for source, _ in messages_to(step, me)) for rank in range(step.ranks)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == by_rank
    metadata = handle.recv_src_metadata
    assert metadata.dtype == np.int32 and metadata.shape == (handle.num_recv_tokens, 2 + step.top_k)
    table = metadata[:received]
    assert np.delete(table, 1, 1).tolist() == expected_metadata(step, me, expand, most, expected.rows)
    assert (table[:, 1] // step.top_k == table[:, 0] // most).all() and (metadata[received:] == -1).all()
    assert handle.dst_buffer_slot_idx.shape == step.ids[me].shape
    assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None

    if ids is not None:
        ids[...] = 77  # the caller's own
    again_x, again_ids, again_weights, same, _ = buffer.dispatch(
        sent[me], handle=handle, do_expand=expand, do_zero_padding=expand, **given)
    assert same is handle
    check_rows(again_x, sent, expected.rows, columns)
    check_routes(me, step, expand, expected.rows, again_ids, again_weights, weighted)
    for part in again_x if isinstance(again_x, tuple) else (again_x,):
        for row, source in enumerate(expected.rows):
            if source is None:
                assert not part[row].tobytes().strip(b"\0")


def check_routes(me, step, expand, rows, ids, weights, weighted):
    first = min(experts_of(me, step), default=0)
    assert (ids is None) == expand and (weights is None) == (not weighted)
    for row, source in enumerate(rows):
        if expand and weighted:
            given = np.float32(0) if source is None else step.weights[source[0]][source[1], source[2]]
            assert same_bits(weights[row], given)
        elif not expand:
            theirs = step.ids[source[0]][source[1]]
            here = np.isin(theirs, experts_of(me, step))
            assert ids.dtype == theirs.dtype and ids[row].tolist() == np.where(here, theirs - first, -1).tolist()
            if weighted:
                assert same_bits(weights[row], np.where(here, step.weights[source[0]][source[1]], np.float32(0)))


@pytest.mark.parametrize("case", ONE_NODE + NODES, ids=name_of)
@pytest.mark.parametrize("multiple", [True, False])
def test_sums_of_random_steps(rng, case, multiple):
    cases = [random_case(rng, len(case[1])) for _ in range(CASES)]
    node_of_rank = case[1] if multiple and len(set(case[1])) > 1 else ()
    outputs = [outputs_of(step, rng, settings["do_expand"]) for step, settings, *_ in cases]
    biases = [[[rng.standard_normal(x.shape).astype(bf16) for _ in range(index % 3)] for x in case[0].tokens]
              for index, case in enumerate(cases)]

    def body(me, buffer):
        for (step, settings, _, weighted), values, bias in zip(cases, outputs, biases):
            expand = settings["do_expand"]
            rows = expected_of(step, me, expand, settings["expert_alignment"]).rows
            x, _, weights, handle, _ = buffer.dispatch(
                step.tokens[me], step.ids[me], step.weights[me] if weighted else None, **settings)
            y = poisoned(x.shape, bf16)
            for row, source in enumerate(rows):
                if source is not None:
                    y[row] = values[source[0], source[1], source[2] if expand else me]
            term = None if not bias[me] else bias[me][0] if len(bias[me]) == 1 else tuple(bias[me])
            for _ in range(2):  # a handle serves any number of calls
                combined, back, event = buffer.combine(y, handle, topk_weights=weights, bias=term)
                expected = expected_sum(step, me, values, expand, not multiple, bias[me], node_of_rank)
                assert combined.dtype == bf16 and same_bits(combined, expected)
                assert (back is None) == (not weighted) and isinstance(event, deep_ep.EventOverlap)
                if weighted:
                    assert same_bits(back, np.where(step.ids[me] >= 0, step.weights[me], np.float32(0)))
        buffer.destroy()

    on_nodes(case, body, allow_multiple_reduction=multiple)


def test_the_given_ids_may_stay_the_handle_s(rng):
    step = skewed_step(rng, 1, 4, 2, 32, 8)

    def body(me, buffer):
        handle = buffer.dispatch(step.tokens[0], step.ids[0], num_experts=4, do_handle_copy=False)[3]
        assert handle.topk_idx is step.ids[0]

    on_ranks(1, body)


def test_more_tokens_than_the_buffer_was_made_for(rng):
    small, large = (skewed_step(rng, 2, 4, 2, 32, most) for most in (8, 60))

    def body(me, buffer):
        x, *_, first, _ = buffer.dispatch(small.tokens[me], small.ids[me], num_experts=4)
        *_, second, _ = buffer.dispatch(large.tokens[me], large.ids[me], num_experts=4, num_max_tokens_per_rank=60)
        assert second.num_max_tokens_per_rank == 60 and first.num_max_tokens_per_rank == 16
        assert same_bits(buffer.dispatch(small.tokens[me], handle=first)[0], x)  # an old handle still works

    on_ranks(2, body)


def test_asynchronous_calls_and_events(rng):
    step = skewed_step(rng, 2, 4, 2, 32, 8)

    def body(me, buffer):
        event = buffer.capture()
        assert isinstance(event, deep_ep.EventHandle)
        for given in ({"previous_event": event}, {"previous_event": deep_ep.EventOverlap(event), "allocate_on_comm_stream": True},
                      {"previous_event_before_epilogue": event}):
            x, *_, handle, overlap = buffer.dispatch(
                step.tokens[me], step.ids[me], num_experts=4, async_with_compute_stream=True, **given)
            overlap.current_stream_wait()
            with overlap(release_handle=True):
                pass
            assert overlap.event is None
            combined, _, overlap = buffer.combine(x, handle, async_with_compute_stream=True, **given)
            overlap.current_stream_wait(release_handle=True)
            assert overlap.event is None and combined.shape == step.tokens[me].shape

    on_ranks(2, body)


def test_gathered_arrays(rng):
    parts = [(rng.integers(0, 99, (2, 3)).astype(np.int16), rng.random(5, np.float32), np.zeros((0, 4), bf16)) for _ in range(4)]

    def body(me, buffer):
        room = buffer.get_agrs_num_max_session_bytes(buffer.group, [part.shape for part in parts[0]], np.dtype(np.float32))
        buffer.agrs_set_config(2 * room, 3)
        with buffer.agrs_new_session():
            *gathered, wait = buffer.all_gather(parts[me])
            wait()
            for index, array in enumerate(gathered):
                assert same_bits(array, np.stack([theirs[index] for theirs in parts]))
            one, wait = buffer.all_gather(parts[me][0])
            assert same_bits(one, gathered[0])
        with buffer.agrs_new_session():
            first, second = buffer.agrs_get_inplace_tensor([(2, 3), (5,)], np.dtype(np.float32))
            first[...], second[...] = parts[me][0], parts[me][1]
            *gathered, wait = buffer.all_gather([first, second])
            assert np.shares_memory(gathered[0], first) and np.shares_memory(gathered[1], second)
            assert same_bits(gathered[1], np.stack([theirs[1] for theirs in parts]))
        with buffer.agrs_new_session(enabled=False), pytest.raises(ferry.UsageError, match="needs an open session"):
            buffer.agrs_get_inplace_tensor((2,), np.dtype(np.float32))
        buffer.barrier(with_cpu_sync=True)

    on_ranks(4, body)


def test_attributes_and_queries():
    def body(me, buffer):
        assert (buffer.rank_idx, buffer.num_ranks) == (me, 4) and buffer.num_max_tokens_per_rank == 16
        assert buffer.get_logical_domain_size() == (1, 4) == (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks)
        assert buffer.get_physical_domain_size() == (2, 2) == (buffer.num_rdma_ranks, buffer.num_nvlink_ranks)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, me)
        assert buffer.get_theoretical_num_sms(8, 2, rdma_gbs=400) == 64 and buffer.get_theoretical_num_qps(64) == 17
        assert buffer.get_comm_stream() is None or buffer.get_comm_stream().cuda_stream
        hint = buffer.get_buffer_size_hint(buffer.group, 64, 7168, 8)
        assert hint % (2 << 20) == 0 and hint > 64 * 7168 * 2 and buffer.get_buffer_size_hint(buffer.group, 64, 7168) > 0
        assert buffer.get_agrs_buffer_size_hint(buffer.group, 5) == 2 << 20
        assert buffer.get_agrs_num_max_session_bytes(buffer.group, (3,), np.dtype(np.float32)) == 64
        for name, arguments in {"engram_write": (1,), "engram_fetch": (1,), "pp_set_config": (1, 2), "pp_send": (1, 2), "pp_recv": (1, 2),
                                "get_engram_storage_size_hint": (1, 2, 3), "get_pp_buffer_size_hint": (1, 2)}.items():
            with pytest.raises(ferry.UnsupportedError, match=f"ElasticBuffer.{name}"):
                getattr(buffer, name)(*arguments)
        with pytest.raises(ferry.UnsupportedError, match="get_pp_buffer_size_hint"):
            deep_ep.ElasticBuffer.get_pp_buffer_size_hint(1, 2)

    on_nodes(NODES[0], body, prefer_overlap_with_compute=False)


def test_poison_reaches_what_is_not_written():
    assert poisoned((2,), np.uint8).tolist() == [POISON, POISON]
