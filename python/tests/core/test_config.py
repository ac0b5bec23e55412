"""Configurations, sizes, placements, traces."""

import copy
import multiprocessing
import pickle

import numpy as np
import pytest

import ferry

SETTINGS = {"experts": 8, "top_k": 2, "hidden": 64, "max_tokens": 16}


@pytest.mark.parametrize("layout", ["expert_major", "expert_padded", "rank_major", "expert_indexed"])
def test_the_size_query_is_exact(layout):
    config = ferry.Config(**SETTINGS, layout=layout, lanes=2, format="fp32")

    def body(rank):
        exchange = ferry.Exchange(rank, config)
        asked = ferry.size_of(config, 4, rank.index)
        for name in ("dispatch_staging", "combine_staging", "signals", "results", "plans", "total"):
            assert getattr(asked, name) == getattr(exchange.sizes, name) > 0
        assert exchange.capacity == ferry.capacity_of(config, 4, rank.index)
        assert len(exchange.dispatch(np.ones((1, 64), np.float32), np.zeros((1, 2), np.int32) + [[0, 1]]).plan.storage) == (
            ferry.plan_bytes(config, 4))

    ferry.Group.threads(4).run(body)


def test_attributes_and_repr_of_a_configuration():
    config = ferry.Config(**SETTINGS, format="fp8-columns-pow2", combine_type="fp32", reduction="exact", deadline=5)
    assert (config.experts, config.top_k, config.hidden, config.max_tokens) == (8, 2, 64, 16)
    assert (config.format, config.combine_type, config.reduction, config.deadline) == ("fp8-columns-pow2", "fp32", "exact", 5.0)
    assert (config.backend, config.layout, config.alignment, config.lanes) == ("automatic", "expert_major", 1, 1)
    assert (config.engine, config.reduction_level) == ("automatic", "automatic")
    assert ferry.Config(**SETTINGS, reduction_level="node").reduction_level == "node"
    assert repr(config) == ("Config(experts=8, top_k=2, hidden=64, max_tokens=16, format='fp8-columns-pow2', combine_type='fp32', "
                            "reduction='exact', deadline=5.0)")
    sizes = ferry.size_of(config, 4)
    assert f"messages={sizes.messages}, total={sizes.total})" in repr(sizes)
    assert repr(ferry.Placement.blocks(8, 4)) == "Placement(8 experts on 4 ranks, version 0)"
    assert ferry.MAX_TOP_K == 32 and ferry.MAX_PARTS == 4


OTHERS = {"placement": ferry.Placement.table([(e % 2, e // 2) for e in range(8)], 2, version=7), "backend": "collective",
          "engine": "mpi", "hops": "one", "window": 7, "local_slots": 5, "shared_experts": 2, "input": "replicated", "transfer": "gather", "layout": "expert_padded", "alignment": 8, "capacity": 64, "repeats": True, "zero_padding": True,
          "format": "fp8-pow2", "combine_type": "fp32", "reduction": "exact", "reduction_level": "node", "layers": 5, "lanes": 3, "deadline": 2.5,
          "own_receive_buffers": False, "check_calls": False, "count_waits": True}


@pytest.mark.parametrize("setting", OTHERS)
def test_configurations_are_values(setting):
    plain, other = ferry.Config(**SETTINGS), ferry.Config(**SETTINGS, **{setting: OTHERS[setting]})
    for config in (plain, other):
        for same in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
            assert same == config and hash(same) == hash(config) and repr(same) == repr(config)
    assert plain != other and plain != 3
    assert repr(other) == repr(plain)[:-1] + f", {setting}={OTHERS[setting]!r})"


def test_placements_in_slices_are_values():
    sliced, whole = ferry.Placement.ep_tp(6, 2, 2), ferry.Placement.table([(e // 3 * 2, e % 3) for e in range(6)], 4)
    assert (sliced.experts, sliced.ranks, sliced.tp, whole.tp) == (6, 4, 2, 1)
    assert sliced.location(4) == whole.location(4) == (2, 1) and sliced.experts_of(3) == [3, 4, 5] and whole.experts_of(3) == []
    again = pickle.loads(pickle.dumps(sliced))
    assert again == copy.deepcopy(sliced) == sliced != whole and hash(again) == hash(sliced) and again.experts_of(3) == [3, 4, 5]
    assert repr(sliced) == "Placement(6 experts on 4 ranks, tp 2)"
    with pytest.raises(ferry.UsageError, match="ep must divide the experts"):
        ferry.Placement.ep_tp(5, 2, 2)


def test_the_automatic_backend_follows_the_memory():
    config = ferry.Group.threads(2).run(lambda rank: ferry.Exchange(rank, **SETTINGS).config)[1]
    assert (config.backend, config.memory) == ("cpu", "host")
    group = ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None, default_memory="device")
    try:
        config = ferry.Exchange(group, **SETTINGS).config
        assert (config.backend, config.memory) == ("cuda", "device")
    except ferry.UnsupportedError:  # no GPU, or no backend cuda
        pass
    assert ferry.Exchange(group, **SETTINGS, memory="host").config.backend == "cpu"
    assert ferry.size_of(ferry.Config(**SETTINGS), ferry.Topology([0, 1])).total == ferry.size_of(
        ferry.Config(**SETTINGS, backend="collective"), ferry.Topology([0, 1])).total


def test_a_backend_of_kernels_works_on_device_memory():
    assert ferry.Config(**SETTINGS, backend="nvshmem").backend == "nvshmem"
    with pytest.raises(ferry.UnsupportedError, match="nvshmem works on device memory"):
        ferry.size_of(ferry.Config(**SETTINGS, backend="nvshmem", memory="host"), 2)


def test_sizes_know_the_nodes():
    config = ferry.Config(**SETTINGS, backend="collective")
    nodes = ferry.Topology([0, 0, 1, 1])
    one_hop, two_hops = ferry.size_of(config, 4, 1), ferry.size_of(config, nodes, 1)
    assert one_hop.messages != two_hops.messages
    assert ferry.size_of(config, ranks=4).total == ferry.size_of(config, ferry.Topology([0] * 4)).total


def test_sizes_of_gpu_backends_need_no_gpu():
    def sizes(backend, ranks=8, **settings):
        return ferry.size_of(ferry.Config(experts=256, top_k=8, hidden=7168, max_tokens=128, backend=backend, **settings), ranks)

    assert sizes("cuda").dispatch_staging == 2 * 8 * 128 * 2 * 7168
    assert sizes("cuda").total == sizes("nvshmem").total > sizes("cuda", own_receive_buffers=False).total
    assert sizes("nvshmem", ferry.Topology([0, 0, 1, 1])).messages > 0 and sizes("collective", memory="device").messages > 0


def text_of(config):
    return repr(config), ferry.size_of(config, 4).total


def test_a_configuration_reaches_another_process():
    config = ferry.Config(**SETTINGS, layout="expert_padded", format="fp8", placement=ferry.Placement.blocks(8, 4))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(text_of, (config,)) == text_of(config)


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"experts": 4}, "missing: top_k, hidden, max_tokens"),
        (SETTINGS | {"top_k": 33}, "top_k = 33, must be 1 to 32"),
        (SETTINGS | {"hidden": 3}, "multiple of 16"),
        (SETTINGS | {"deadline": 0}, "deadline = 0 s, must be positive"),
        (SETTINGS | {"lanes": 65}, "lanes = 65"),
        (SETTINGS | {"reduction_level": "host"}, "reduction_level: 'host' is not one of automatic, rank, node"),
        (SETTINGS | {"backend": "reference"}, "backend: 'reference' is not one of automatic, cpu, cuda, collective, nvshmem"),
        (SETTINGS | {"layout": "rank_major", "alignment": 8}, "rank_major rows have no alignment"),
        (SETTINGS | {"capacity": 12, "alignment": 8}, "not a multiple of alignment"),
        (SETTINGS | {"format": "raw:17"}, "17"),
        (SETTINGS | {"placement": ferry.Placement.blocks(4, 2)}, "the placement is for 4 experts"),
        (SETTINGS | {"experts": np.int64(1 << 40)}, "experts: expected an integer from -2147483648 to 2147483647, got"),
        (SETTINGS | {"capacity": 1 << 80}, "capacity: expected an integer from -9223372036854775808 to"),
        (SETTINGS | {"hidden": 64.0}, "hidden: expected an integer, got 64.0"),
        (SETTINGS | {"lanes": True}, "lanes: expected an integer, got True"),
        (SETTINGS | {"lanes": np.True_}, "lanes: expected an integer, got .*True"),
        (SETTINGS | {"deadline": "3"}, "deadline: expected a number of seconds, got '3'"),
    ],
)
def test_config_checks_what_needs_no_rank_count(settings, pattern):
    with pytest.raises(ferry.UsageError, match=pattern):
        ferry.Config(**settings)


def test_numpy_numbers_as_settings():
    config = ferry.Config(
        experts=np.int64(8), top_k=np.uint8(2), hidden=np.int32(64), max_tokens=np.array([16])[0], capacity=np.int16(32),
        deadline=np.float32(2.5))
    assert (config.experts, config.top_k, config.hidden, config.max_tokens) == (8, 2, 64, 16)
    assert (config.capacity, config.deadline) == (32, 2.5) and ferry.Config(**SETTINGS, deadline=np.int64(3)).deadline == 3

    def body(rank):
        return ferry.Exchange(rank, config).metadata(np.int64(3), lane=np.int64(0)).tolist()

    assert ferry.Group.threads(1).run(body) == [[3, 0, 3]]


def test_any_placement():
    table = [(2, 0), (0, 1), (0, 0), (2, 1), (2, 2)]
    placement = ferry.Placement.table(table, 4, version=7)
    assert (placement.experts, placement.ranks, placement.version) == (5, 4, 7)
    assert [placement.location(expert) for expert in range(5)] == table
    assert placement.experts_of(0) == [2, 1] and placement.experts_of(1) == []
    with pytest.raises(ferry.UsageError, match="expert = 5"):
        placement.location(5)
    with pytest.raises(ferry.UsageError, match="rank = 4"):
        placement.experts_of(4)
    with pytest.raises(ferry.UsageError):
        ferry.Placement.table([(0, 0), (0, 0)], 1)

    def body(rank):
        exchange = ferry.Exchange(rank, experts=5, top_k=1, hidden=8, max_tokens=5, format="fp32", placement=placement)
        rows = exchange.dispatch(np.ones((5, 8), np.float32), np.arange(5, dtype=np.int32)[:, None])
        return rows.group_expert.tolist()

    assert ferry.Group.threads(4).run(body) == [[2, 1], [], [0, 3, 4], []]


def test_traces_and_load_statistics(tmp_path):
    trace = ferry.open_trace("synth:decode:experts=32,top_k=4,tokens=64,layers=2,seed=3")
    assert trace.sequence_lengths == [64]
    assert (trace.layers, trace.tokens, trace.top_k, trace.experts) == (2, 64, 4, 32)
    assert trace.ids.shape == trace.weights.shape == (2, 64, 4) and np.allclose(trace.weights.sum(-1), 1, atol=1e-5)
    ids, weights = trace.partition(1, rank=2, ranks=4, tokens_per_rank=8, step=1)
    assert np.array_equal(ids, trace.ids[1, 48:56]) and np.array_equal(weights, trace.weights[1, 48:56])
    counts = trace.expert_counts(0)
    assert counts.tolist() == np.bincount(trace.ids[0].ravel(), minlength=32).tolist()
    assert repr(trace) == f"Trace('{trace.name}', layers=2, tokens=64, top_k=4, experts=32)"
    statistics = ferry.load_statistics(counts)
    assert repr(statistics).startswith(f"LoadStatistics(routes={statistics.routes}, max=")
    assert statistics.routes == 256 and statistics.max == counts.max() / 8
    assert ferry.rank_counts(counts, ferry.Placement.blocks(32, 4)).tolist() == counts.reshape(4, 8).sum(1).tolist()
    trace.save(str(tmp_path / "saved"))
    assert np.array_equal(ferry.open_trace(str(tmp_path / "saved.ids.npy")).ids, trace.ids)
    with pytest.raises(ferry.UsageError):
        ferry.open_trace("synth:nothing")
    with pytest.raises(ferry.UsageError, match="counts: expected a dense int64"):
        ferry.load_statistics(np.ones(3, np.float32))
