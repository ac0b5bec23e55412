"""Normal mode between nodes: the elements of handles, from the plan and from the routes of every rank to this node.

A handle's `node_routes` is int32 [R, 1 + T or more]. Its row of a source rank holds the rank's N, then for each of its tokens the
ranks of this node that the token goes to, as bits by local rank. Elements by channel count tokens of the channels of
their source: blocks of neighbouring tokens of equal size. Here `local` is this rank's local rank, and the sources that it is
the relay of are the ranks of the same local rank, itself among them, if all nodes have the same number of ranks.
"""

from __future__ import annotations

import ferry
from ferry.deep_ep import _layout
from ferry.deep_ep._arrays import arrays_of

MOST_RANKS_OF_A_NODE = 31  # bits of an int32


class RouteColumns:
    """What this node's routes are made with. Made once: copies from the host make it wait, and cannot be captured."""

    def __init__(self, arrays, topology, like):
        """`like`: an array of the device."""
        nodes = [topology.ranks_of(node) for node in range(topology.nodes)]
        most = max(map(len, nodes))
        ranks = [of_node + [-1] * (most - len(of_node)) for of_node in nodes]
        self._arrays = arrays
        self.ids = arrays.from_list(ranks, "int32", like)  # [nodes, most]: the ranks of each node, then -1
        self._columns = arrays.from_list([max(0, rank) for of_node in ranks for rank in of_node], "int64", like)
        self._bits = arrays.from_list([[(rank >= 0) << local for local, rank in enumerate(of_node)] for of_node in ranks], "int32", like)

    def rows_to_send(self, is_token_in_rank, columns):
        """int32 [nodes, columns]: what every node learns of this rank's routes, a row of node_routes each."""
        arrays, tokens = self._arrays, len(is_token_in_rank)
        rows = arrays.full((len(self.ids), columns), 0, "int32", is_token_in_rank)
        rows[:, 0] = tokens
        goes = is_token_in_rank[:, self._columns].reshape(tokens, *self._bits.shape)
        rows[:, 1 : 1 + tokens] = (goes * self._bits).sum(2, dtype=arrays.type("int32")).T
        return rows


def element(handle, index):
    """Element `index` of a handle between nodes, apart from is_token_in_rank."""
    return _ELEMENTS[index](handle, arrays_of(handle.is_token_in_rank))


def in_node(handle, arrays):
    """bool [T, nodes]: whether a token goes to a rank of the node."""
    in_rank, topology = handle.is_token_in_rank, handle.topology
    columns = [in_rank[:, topology.ranks_of(node)].any(1) for node in range(topology.nodes)]
    return arrays.stack(columns, 1)


def rdma_channel_prefix_matrix(handle, arrays):
    """int32 [nodes, C]: at [n, c] this rank's tokens of channels 0 to c that go to node n."""
    return _layout.channel_prefix_matrix(arrays, in_node(handle, arrays), handle.channels)


def gbl_channel_prefix_matrix(handle, arrays):
    """int32 [R, C]: at [r, c] this rank's tokens of channels 0 to c that go to rank r."""
    return _layout.channel_prefix_matrix(arrays, handle.is_token_in_rank, handle.channels)


def recv_rdma_channel_prefix_matrix(handle, arrays):
    """int32 [nodes, C]: at [n, c] the tokens of channels 0 to c of the sources on node n that this rank is the relay of."""
    rows = []
    for sources in relayed(handle):
        of_node = arrays.full((handle.channels,), 0, "int32", handle.is_token_in_rank)
        for bits in routes_of(handle, arrays, sources):
            of_node = of_node + _layout.channel_prefix_matrix(arrays, (bits != 0)[:, None], handle.channels)[0]
        rows.append(of_node)
    return arrays.stack(rows, 0)


def recv_rdma_rank_prefix_sum(handle, arrays):
    """int32 [nodes]: at [n] the tokens that this rank is the relay of, from nodes 0 to n."""
    counts = [sum(int((bits != 0).sum()) for bits in routes_of(handle, arrays, sources)) for sources in relayed(handle)]
    return arrays.to(arrays.from_list(counts, "int64", handle.is_token_in_rank).cumsum(0), "int32")


def recv_gbl_channel_prefix_matrix(handle, arrays):
    """int32 [R, C]: at [r, c] the first row here of channel c of source rank r."""
    _require_routes(handle)
    tokens = tokens_of_ranks(handle, arrays)
    first_of_channel = _layout.recv_channel_prefix_matrix(arrays, _layout.sources(arrays, handle), tokens, handle.channels)
    rows = _from_each(handle)
    return arrays.to(first_of_channel + arrays.to(rows.cumsum(0) - rows, "int32")[:, None], "int32")


def recv_gbl_rank_prefix_sum(handle, arrays):
    """int32 [R]: at [r] the rows here from source ranks 0 to r."""
    return arrays.to(_from_each(handle).cumsum(0), "int32")


def recv_src_meta(handle, arrays):
    """uint8 [N, 8], of each row two int32: its source node, and the ranks of this node that it went to as bits."""
    _require_routes(handle)
    source = arrays.to(_layout.sources(arrays, handle), "int64")
    rank, token = source[:, 0], source[:, 1]
    nodes = [handle.topology.node_of(r) for r in range(handle.topology.ranks)]
    node_of = arrays.from_list(nodes, "int32", source)
    return arrays.bytes_of(arrays.stack([node_of[rank], handle.node_routes[rank, token + 1]], 1))


def send_rdma_head(handle, arrays):
    """int32 [T, nodes]: the token's index among the tokens of its channel that go to the node; -1 if it does not go there."""
    return _layout.send_head(arrays, in_node(handle, arrays), handle.channels)


def send_nvl_head(handle, arrays):
    """int32 [recv_rdma_rank_prefix_sum[-1], ranks of this node], a row for each token that this rank is the relay of, by source
    node, source rank and token: its index among the tokens of its channel and source that go to the rank; -1 if it does not."""
    node = handle.topology.node_of(handle.exchange.rank)
    ranks = len(handle.topology.ranks_of(node))
    rows = [arrays.full((0, ranks), 0, "int32", handle.is_token_in_rank)]
    for sources in relayed(handle):
        for bits in routes_of(handle, arrays, sources):
            local = arrays.arange(ranks, "int32", bits)
            goes = ((bits[:, None] >> local[None, :]) & 1) != 0
            rows.append(_layout.send_head(arrays, goes, handle.channels)[bits != 0])
    return arrays.concatenate(rows)


_ELEMENTS = {
    1: rdma_channel_prefix_matrix,
    2: gbl_channel_prefix_matrix,
    3: recv_rdma_channel_prefix_matrix,
    4: recv_rdma_rank_prefix_sum,
    5: recv_gbl_channel_prefix_matrix,
    6: recv_gbl_rank_prefix_sum,
    7: recv_src_meta,
    8: send_rdma_head,
    9: send_nvl_head,
}


def relayed(handle):
    """For each node the source ranks that this rank is the relay of; of its own node that is the rank itself."""
    me, topology = handle.exchange.rank, handle.topology
    size = len(topology.ranks_of(topology.node_of(me)))
    mine = topology.local_rank_of(me)
    return [[rank for rank in topology.ranks_of(node) if topology.local_rank_of(rank) % size == mine]
            for node in range(topology.nodes)]


def routes_of(handle, arrays, sources):
    """Of each source rank int32 [T]: the ranks of this node that its tokens go to, as bits."""
    _require_routes(handle)
    tokens = tokens_of_ranks(handle, arrays)
    return [handle.node_routes[rank, 1 : 1 + tokens[rank]] for rank in sources]


def tokens_of_ranks(handle, arrays):
    return arrays.on_host(handle.node_routes[:, 0]).tolist()


def _from_each(handle):
    return handle.plan.tokens_between[:, handle.exchange.rank]


def _require_routes(handle):
    if handle.node_routes is None:
        raise ferry.UnsupportedError(
            f"handle: this element holds the ranks of a node as bits, of at most {MOST_RANKS_OF_A_NODE} ranks; a node has more")
