"""HybridEPBuffer with NumPy on CPUs: rows, probabilities, sums and handles against plain loops."""

import inspect

import numpy as np
import pytest

import ferry
import ferry.deep_ep as deep_ep
from hybrid_steps import HIDDEN, Steps, buffer_of, fp8_rows, random_case
from ferry.deep_ep import _arrays
from node_ranks import EVEN, OTHERS, TRANSPORTS, name_of
from oracle import POISON, bf16


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """New arrays of the package hold poison, so that whatever a call leaves out is seen."""

    def empty(self, shape, name, like=None):
        array = np.empty(shape, self.type(name))
        array.view(np.uint8)[...] = POISON
        return array

    monkeypatch.setattr(_arrays.NumpyArrays, "empty", empty)


def run(case, body, transport="shared memory", most=9):
    """Calls body(steps) as every rank."""
    if transport == "shared memory" and set(case.nodes) == {0}:
        return ferry.Group.threads(case.ranks).run(lambda rank: body(Steps(case, rank.index, buffer_of(rank, case, most))))
    return TRANSPORTS[transport](case.nodes, lambda rank: body(Steps(case, rank.index, buffer_of(rank, case, most))))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("by", ["map", "ids"])
@pytest.mark.parametrize("skew", [False, True])
def test_all_calls(rng, ranks, by, skew):
    seeds = rng.integers(1 << 31, size=ranks)
    case = random_case(rng, ranks, skew=skew)

    def body(steps):
        mine = np.random.default_rng(seeds[steps.me])
        for pad in (None, 0, 1, 4, 32):
            steps.check_permuted(pad, by=by, rng=mine)
        steps.check_plain(by, mine)

    run(case, body)


@pytest.mark.parametrize("non_blocking", [True, False])
@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize("pad", [None, 4])
def test_a_given_number_of_rows(rng, non_blocking, skew, pad):
    case = random_case(rng, 4, skew=skew, density=0.6)
    most = max(case.total(rank, pad or 1) for rank in range(4))

    def body(steps):
        for limit in (0, 8, most // 2 // 4 * 4, -(-most // 4) * 4, most + 400 - most % 4):
            steps.check_permuted(pad, limit, non_blocking=non_blocking)

    run(case, body)


def test_each_rank_may_choose_its_number_of_rows(rng):
    case = random_case(rng, 2, density=0.9)

    def body(steps):
        limit = 400 if steps.me else 4
        hidden, _, _, counts, handle = steps.buffer.dispatch_with_permute(
            hidden=steps.x, routing_map=steps.map, num_permuted_tokens=limit, non_blocking=True)
        assert len(hidden) == limit and counts.tolist() == case.permuted(steps.me, 1, limit)[1]
        assert handle[-1].tolist() == [int(case.total(steps.me, 1) > limit)]

    run(case, body)


@pytest.mark.parametrize("element", ["float8", "uint8"])
def test_fp8(rng, element):
    case = random_case(rng, 2)
    values, factors = fp8_rows(rng, case, *([np.uint8] if element == "uint8" else []))
    run(case, lambda steps: steps.check_fp8(values, factors, 8))


@pytest.mark.parametrize("case", EVEN[:2] + OTHERS[:3], ids=name_of)
def test_between_nodes(rng, case):
    transport, nodes = case
    case = random_case(rng, len(nodes), nodes)

    def body(steps):
        steps.check_permuted(4)
        steps.check_permuted(4, 8, non_blocking=True)
        steps.check_plain()
        assert steps.buffer.num_of_nodes == 1 + max(nodes) and steps.buffer.node_rank == nodes[steps.me]
        assert steps.buffer.num_of_hybrid_ep_ranks_per_nvlink_domain == nodes.count(nodes[steps.me])
        assert steps.buffer.local_rank == nodes[: steps.me].count(nodes[steps.me])

    run(case, body, transport)


def test_more_tokens_than_the_constructor_was_told(rng):
    """The buffer grows, in blocking and other calls; handles of the smaller one stay valid."""
    small, large = random_case(rng, 2, most=4), random_case(rng, 2, most=40)
    large = type(large)(large.nodes, 4, *([np.repeat(a, 30, 0)[:300] for a in each] for each in (large.maps, large.probs, large.hidden)))

    def body(rank):
        buffer = buffer_of(rank, small, 4)
        first = Steps(small, rank.index, buffer)
        handle = first.check_permuted(4)
        Steps(large, rank.index, buffer).check_permuted(4)
        assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank >= len(large.hidden[rank.index])
        *_, again = buffer.dispatch_with_permute(hidden=first.x, handle=handle, routing_map=first.map, probs=first.probs)
        assert again is handle

    ferry.Group.threads(2).run(body)


def test_many_experts(rng):
    """A map of more experts than a token has slots."""
    case = random_case(rng, 2, local=24, density=0.2)
    run(case, lambda steps: (steps.check_permuted(4), steps.check_plain()))


def test_the_configuration():
    def body(rank):
        buffer = deep_ep.HybridEPBuffer(
            group=rank, hidden_dim=HIDDEN, max_num_of_tokens_per_rank=7, num_local_experts=2, use_fp8=True, num_sms_dispatch_api=16,
            num_sms_combine_api=16, load_cached_kernels=True, use_shared_buffer=True, enable_custom_allgather=True)
        room = buffer.configurer.buffer_config
        assert (buffer.group, buffer.rank, buffer.group_size) == (rank, rank.index, 2)
        assert (room.hidden_dim, room.max_num_of_tokens_per_rank, room.num_of_experts_per_rank) == (HIDDEN, 7, 2)
        config = buffer.update_template_config(512, 17, 4, 32, num_of_stages_dispatch_api=3)
        assert isinstance(config, deep_ep.HybridEpConfigInstance)
        assert (config.hidden_dim, config.max_num_of_tokens_per_rank, config.num_of_experts_per_rank, config.pad_multiple) == (512, 32, 4, 32)
        assert config.num_of_stages_dispatch_api == 3 and room.max_num_of_tokens_per_rank == 32 and room.hidden_dim == HIDDEN
        with pytest.raises(ferry.UsageError, match="there is no num_stages"):
            buffer.update_template_config(num_stages=3)
        buffer.empty_jit_cache()

    ferry.Group.threads(2).run(body)


def test_deprecated_arguments(rng):
    case = random_case(rng, 1)

    def body(rank):
        steps = Steps(case, 0, buffer_of(rank, case))
        given = {"hidden": steps.x, "routing_map": steps.map}
        with pytest.warns(UserWarning, match="num_dispatched_tokens is deprecated"):
            rows, *_, handle = steps.buffer.dispatch_with_permute(**given, num_dispatched_tokens=3)
        with pytest.warns(UserWarning, match="num_dispatched_tokens is deprecated"):
            steps.buffer.combine_with_unpermute(hidden=rows, handle=handle, num_dispatched_tokens=3)
        with pytest.warns(UserWarning, match="use_host_meta is deprecated"):
            rows, *_ = steps.buffer.dispatch_with_permute(**given, use_host_meta=False, num_permuted_tokens=64)
        assert len(rows) == 64

    ferry.Group.threads(1).run(body)


def test_indices_to_map(rng):
    ids = np.array([[2, -1], [0, 3], [1, 1]])
    weights = rng.random((3, 2), np.float32)
    routing_map, probs = deep_ep.hybrid_ep_buffer.indices_to_map(ids, weights, 3, 4)
    assert routing_map.tolist() == [[False, False, True, False], [True, False, False, True], [False, True, False, False]]
    assert probs.dtype == np.float32 and probs[0].tolist() == [0, 0, weights[0, 0], 0]
    assert deep_ep.hybrid_ep_buffer.indices_to_map(ids, None, 3, 4)[1] is None
    with pytest.raises(ferry.UsageError, match="topk_idx: token 1 has 3 in slot 1, must be from -1 to 2"):
        deep_ep.hybrid_ep_buffer.indices_to_map(ids, None, 3, 3)


def test_callers_see_the_signature():
    """Megatron-Core looks whether the fused kernels are there."""
    assert "fuse_permute_dispatch" in inspect.signature(deep_ep.HybridEPBuffer.dispatch_with_permute).parameters
    assert deep_ep.hybrid_ep_buffer.HybridEPBuffer is deep_ep.HybridEPBuffer


def test_elements_of_the_kernels_are_refused_by_name(rng):
    case = random_case(rng, 1)

    def body(rank):
        steps = Steps(case, 0, buffer_of(rank, case))
        permuted, plain = steps.check_permuted(), steps.check_plain()
        for handle, names in [(permuted, {0: "sparse_to_dense_map", 4: "local_expert_routing_map", 6: "dense_to_expert_map"}),
                              (plain, {1: "rdma_to_attn_map", 2: "attn_to_rdma_map"})]:
            for index, name in names.items():
                with pytest.raises(ferry.UnsupportedError, match=f"handle: Ferry has no {name}"):
                    handle[index].shape
        assert permuted[-3:][0] == len(case.maps[0])

    ferry.Group.threads(1).run(body)


def test_nothing_is_routed(rng):
    case = random_case(rng, 2, density=0)
    assert all(x.dtype == bf16 for x in case.hidden)
    run(case, lambda steps: (steps.check_permuted(8), steps.check_permuted(8, 16, non_blocking=True), steps.check_plain()))
