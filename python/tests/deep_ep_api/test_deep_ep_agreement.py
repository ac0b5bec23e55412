"""Ranks that disagree about a call of deep_ep: each gets an error at once, and the next call works."""

import pytest

import ferry
from deep_ep_steps import full_step, layout_and_dispatch, low_latency, on_ranks, step_of


def test_ranks_with_different_shapes(rng):
    step = step_of(rng, ranks=2)

    @on_ranks(2)
    def _(me, buffer):
        cut = type(step)(step.experts, 2 if me else 3, step.tokens, [i[:, : 2 if me else 3] for i in step.ids],
                         [w[:, : 2 if me else 3] for w in step.weights])
        with pytest.raises(ferry.UsageError, match="hidden, experts, top_k"):
            layout_and_dispatch(buffer, cut, me)


def first_combine_of_weights(buffer, step, me):
    rows, _, weights, _, handle, _ = layout_and_dispatch(buffer, step, me)
    buffer.combine(rows, handle, topk_weights=weights)


@pytest.mark.parametrize(("theirs", "call"), [(low_latency, "the first low-latency call of a shape"),
                                              (first_combine_of_weights, "the first combine with topk_weights of a shape")])
def test_ranks_in_different_calls(rng, theirs, call):
    step = full_step(rng)

    def without_weights(buffer, step, me):
        rows, *_, handle, _ = layout_and_dispatch(buffer, step, me)
        buffer.combine(rows, handle)
        layout_and_dispatch(buffer, step, me)

    @on_ranks(2)
    def _(me, buffer):
        mine = theirs if me else without_weights if theirs is first_combine_of_weights else layout_and_dispatch
        with pytest.raises(ferry.UsageError, match=f"rank 0 is in a dispatch without a handle, rank 1 in {call}"):
            mine(buffer, step, me)
        first_combine_of_weights(buffer, step, me)
        low_latency(buffer, step, me)


@pytest.mark.parametrize(("name", "other"), [("max_tokens", {"most": 12}), ("experts", {"experts": 32}),
                                             ("top_k", {"top_k": 2}), ("hidden", {"hidden": 128})])
def test_ranks_with_different_low_latency_shapes(rng, name, other):
    step = full_step(rng)

    @on_ranks(2)
    def _(me, buffer):
        mine = other if me else {}
        x, ids = step.tokens[me][:, : mine.get("hidden")], step.ids[me][:, : mine.get("top_k")]
        with pytest.raises(ferry.UsageError, match=f"configurations differ: {name} is"):
            buffer.low_latency_dispatch(x, ids, mine.get("most", 9), mine.get("experts", 16))
        low_latency(buffer, step, me)
