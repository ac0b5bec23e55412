"""Every call that code for several nodes makes of deep_ep, with arrays of NumPy or PyTorch, against loops. Runs in each process."""

import numpy as np

import ferry.deep_ep as deep_ep
from deep_ep_steps import HIDDEN, low_latency
from oracle import Step, bf16, experts_of, messages_to, routes_to, same_bits


def check_all_calls(buffer, step, me, from_numpy=lambda array: array, to_numpy=lambda array: array, channels=12):
    """`step`: of NumPy arrays, the same on every rank; `from_numpy`, `to_numpy`: to the arrays of calls and back."""
    x, ids, weights = (from_numpy(arrays[me]) for arrays in (step.tokens, step.ids, step.weights))
    config = deep_ep.Config(2 * channels, 8, 256, 16, 128)
    expected = messages_to(step, me)
    rows_expected = np.array([step.tokens[s][t] for s, t in expected], bf16).reshape(-1, HIDDEN)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, step.experts)
    layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_node, "is_token_in_rank": in_rank,
              "num_tokens_per_expert": per_expert, "config": config}
    fan_out = to_numpy(in_rank).sum(1, keepdims=True)
    bias = [from_numpy((step.tokens[me] * bf16(factor)).astype(bf16)) for factor in (1, -0.5)]
    dense = step.tokens[me].astype(np.float64) * (fan_out + 0.5)
    counts_expected = [sum(route[0] == expert for route in routes_to(step, me)) for expert in experts_of(me, step)]
    for previous in (False, True):
        for asynchronous in (False, True):
            for with_ids in (False, True):
                def settings():
                    event = {"previous_event": buffer.capture()} if previous else {}
                    return {"config": config, "async_finish": asynchronous} | event

                def finished(result):
                    if asynchronous:
                        result[-1].current_stream_wait()
                    return result

                routes = {"topk_idx": ids, "topk_weights": weights} if with_ids else {}
                rows, idx, of_rows, counts, handle, _ = finished(buffer.dispatch(x, **(layout | routes | settings())))
                assert same_bits(to_numpy(rows), rows_expected) and counts == counts_expected
                ends = to_numpy(handle[-4]).tolist()
                assert ends == [sum(s <= rank for s, _ in expected) for rank in range(step.ranks)]
                if with_ids:
                    assert to_numpy(idx).shape == to_numpy(of_rows).shape == (len(expected), step.top_k)
                    assert [int((to_numpy(idx) == e).sum()) for e in range(len(counts))] == counts
                again = finished(buffer.dispatch(x, handle=handle, **settings()))
                assert same_bits(to_numpy(again[0]), rows_expected)
                y, of_slots, _ = finished(buffer.combine(
                    again[0], handle, topk_weights=of_rows, bias=tuple(bias), **settings()))
                assert np.abs(to_numpy(y).astype(np.float64) - dense).max(initial=0) <= 0.04 * np.abs(dense).max(initial=0)
                if with_ids:
                    assert same_bits(to_numpy(of_slots), np.where(step.ids[me] >= 0, step.weights[me], np.float32(0)))
    return [to_numpy(element) for element in handle]


def decoded(values, scales):
    """The rows of fp8 `values`, whose blocks of 128 columns have `scales`."""
    blocks = values.astype(np.float32).reshape(*scales.shape, 128)
    return (blocks * scales[..., None]).reshape(values.shape).astype(bf16)


def check_low_latency(buffer, step, me, from_numpy=lambda array: array, to_numpy=lambda array: array):
    mine = Step(step.experts, step.top_k, {me: from_numpy(step.tokens[me])}, {me: from_numpy(step.ids[me])}, {me: from_numpy(step.weights[me])})
    most = max(map(len, step.tokens))
    weights = np.where(step.ids[me] >= 0, step.weights[me], 0).sum(1, keepdims=True)
    dense = step.tokens[me].astype(np.float64) * weights
    for hooked in (False, True):
        for use_fp8 in (False, True):
            recv, counts, handle, _, hook = low_latency(buffer, mine, me, most, use_fp8=use_fp8, return_recv_hook=hooked)
            if hooked:
                hook()
            routes = [[r for r in routes_to(step, me) if r[0] == expert] for expert in experts_of(me, step)]
            assert to_numpy(counts).tolist() == [len(of_expert) for of_expert in routes]
            rows = decoded(*map(to_numpy, recv)) if use_fp8 else to_numpy(recv)
            for local, of_expert in enumerate(routes):
                sent = np.array([step.tokens[s][t] for _, s, t, _ in of_expert], bf16).reshape(-1, HIDDEN)
                received = rows[local, : len(sent)]
                if use_fp8:
                    assert np.allclose(received.astype(np.float32), sent.astype(np.float32), rtol=0.07, atol=0.02)
                else:
                    assert same_bits(received, sent)
            outputs = from_numpy(np.nan_to_num(rows)) if use_fp8 else recv
            y, _, hook = buffer.low_latency_combine(outputs, mine.ids[me], mine.weights[me], handle, return_recv_hook=hooked)
            if hooked:
                hook()
            error = np.abs(to_numpy(y).astype(np.float64) - dense).max(initial=0)
            assert error <= (0.08 if use_fp8 else 0.04) * (1 + np.abs(dense).max(initial=0))
