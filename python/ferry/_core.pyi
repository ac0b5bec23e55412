"""The compiled part of ferry. Import ferry instead."""

from collections.abc import Callable, Mapping, Sequence
import os
from typing import Any, Literal, TypeVar, overload

import ferry._counts
import ferry._typing


_Result = TypeVar("_Result")
__version__: str

MAX_TOP_K: int = 32

MAX_PARTS: int = 4

def has_cuda() -> bool:
    """
    Whether this build has the CUDA backend. It does not tell whether the machine has a GPU.
    """

class Placement:
    """Which rank holds which expert. Immutable."""

    @staticmethod
    def blocks(experts: int, ranks: int) -> Placement:
        """
        Blocks of neighbouring experts. The first experts % ranks ranks hold one expert more.
        """

    @staticmethod
    def table(locations: Sequence[tuple[int, int]], ranks: int, version: int = 0) -> Placement:
        """
        Any table: the (rank, local expert) of each expert. UsageError if a rank's local experts are not 0, 1, 2, ... once each.
        """

    @staticmethod
    def ep_tp(experts: int, ep: int, tp: int) -> Placement:
        """
        Experts in slices, on ep * tp ranks: slice i of expert e is on rank e // (experts // ep) * tp + i. The tp ranks that hold slices of the same experts pass the same tokens. Not with 'cuda' in two hops, nor with 'nvshmem' between nodes.
        """

    @property
    def experts(self) -> int:
        """E, the number of experts."""

    @property
    def ranks(self) -> int:
        """R, the number of ranks."""

    @property
    def tp(self) -> int:
        """Slices of each expert: 1 unless made by ep_tp()."""

    @property
    def version(self) -> int:
        """The version given to table(); 0 for others."""

    def location(self, expert: int) -> tuple[int, int]:
        """(rank, local expert) of an expert; ep_tp: of its slice 0."""

    def experts_of(self, rank: int) -> list[int]:
        """The global ids of a rank's experts, in local order."""

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __getstate__(self) -> tuple[tuple[tuple[int, int], ...], int, int, int]: ...

    def __setstate__(self, state: tuple[tuple[tuple[int, int], ...], int, int, int], /) -> None: ...

    def __repr__(self) -> str: ...

class Config:
    """
    The configuration of an exchange, the same on every rank.

    Config(experts=E, top_k=K, hidden=H, max_tokens=T, ...). These four are required. The others:

    backend              'cpu', 'cuda', 'collective' or 'nvshmem'; default: 'cuda' in a Group.torch() that uses NCCL,
                         else 'cpu'. 'collective' is for groups over several hosts and uses the engine that the group has brought;
                         so is 'nvshmem', whose kernels put messages between GPUs of different hosts by themselves
    engine               'nccl': NCCL, on device memory; 'mpi' or 'custom': the engine that the group must have brought; default
                         'automatic', any that it has brought
    memory               'host' or 'device': where all arrays lie; default 'automatic', 'device' with 'cuda', 'nvshmem' and 'nccl', else 'host'. Only
                         'collective' has both
    hops                 'one' or 'two': whether a token goes straight to each rank of another node, or once to the node, to a
                         relay; default 'automatic', two where 'collective' on host memory has several nodes and one has
                         several ranks, and where 'nvshmem' has several nodes and max_tokens x hidden is above 14,336
    window               bounds what a rank has on its way to another one. 'collective': messages of a round; default 0, no bound.
                         'cpu', 'cuda' and 'nvshmem' in two hops: staging, in messages for each pair of ranks; default 0, 4 MiB a rank and lane,
                         on GPUs up to 24 MiB for each hop
    shared_experts       experts that every rank holds and every token goes to: their rows are groups 0 to shared_experts - 1, and
                         combine adds their outputs; at most 16; default 0
    input                'own', or 'replicated': every rank passes the same tokens and keeps the routes to its own experts; nothing
                         travels, and combine gives each rank its own sum. 'partial' only; default 'own'
    shared_split         with replicated input: how many ranks share the tokens' rows of shared experts among them; default 0,
                         every rank takes all
    transfer             'routed', or 'gather': dispatch sends every token to every rank, and each rank returns one sum for it, for
                         few tokens with many experts. The same rows and results; 'partial' at level 'rank' only, expert layouts,
                         not 'nvshmem'; default 'routed'
    placement            a Placement; default: Placement.blocks(experts, ranks)
    layout               'expert_major', 'expert_padded' or 'rank_major'; default 'expert_major'
    alignment            each expert's first row is a multiple of it; default 1
    capacity             rows a rank can receive (expert_padded: each expert), padding included, a multiple of alignment;
                         default 0: room for any routing in which no token lists an expert more than once
    repeats              the default capacity also has room for tokens that list an expert more than once; default False
    zero_padding         padding rows are set to zero; default False
    format               'bf16', 'fp16', 'fp32', 'fp8' with any of -columns, -pow2, -packed, 'mxfp8' and
                         'mxfp4' with any of -up or -ocp, -columns or -tiles, 'nvfp4' with any of -token,
                         -columns or -tiles, or
                         'raw:BYTES+BYTES...'. A dispatch may use another one whose rows are no larger; default 'bf16'
    combine_type         'bf16', 'fp16' or 'fp32': type of the rows that combine sends; default 'bf16'
    reduction            'partial', 'exact' or 'unreduced'; a combine may use another one that needs no more staging; default
                         'partial'
    reduction_level      'rank' or 'node': 'partial' adds the sums of single ranks, or first those of each node; default
                         'automatic', 'node' in a group of several nodes. 'cuda' in one hop has only 'rank'
    lanes                independent sequences of calls, which may overlap; default 1
    deadline             seconds a wait may last; default 30
    own_receive_buffers  the lanes have receive buffers; with False every dispatch needs ReceiveBuffers; default True
    check_calls          host backends call check() at the end of every call; default True

    Raises UsageError for a setting that is missing, unknown or invalid. Constraints that depend on the number of ranks are
    checked by Exchange, size_of and capacity_of.
    """

    def __init__(self, *, experts: int, top_k: int, hidden: int, max_tokens: int, backend: Literal['cpu', 'cuda', 'collective', 'nvshmem'] = ..., engine: Literal['automatic', 'mpi', 'custom', 'nccl'] = 'automatic', memory: Literal['automatic', 'host', 'device'] = 'automatic', hops: Literal['automatic', 'one', 'two'] = 'automatic', window: int = 0, shared_experts: int = 0, input: Literal['own', 'replicated'] = 'own', shared_split: int = 0, transfer: Literal['routed', 'gather'] = 'routed', placement: Placement = ..., layout: Literal['expert_major', 'expert_padded', 'rank_major'] = 'expert_major', alignment: int = 1, capacity: int = 0, repeats: bool = False, zero_padding: bool = False, format: str = 'bf16', combine_type: Literal['bf16', 'fp16', 'fp32'] = 'bf16', reduction: Literal['partial', 'exact', 'unreduced'] = 'partial', reduction_level: Literal['automatic', 'rank', 'node'] = 'automatic', lanes: int = 1, deadline: float = 30.0, own_receive_buffers: bool = True, check_calls: bool = True) -> None: ...

    @property
    def experts(self) -> int:
        """E, the number of experts."""

    @property
    def top_k(self) -> int:
        """K, experts of a token: 1 to 32."""

    @property
    def hidden(self) -> int:
        """H, columns of a token."""

    @property
    def max_tokens(self) -> int:
        """T, the most tokens of a rank in a call."""

    @property
    def shared_experts(self) -> int:
        """Experts that every rank holds."""

    @property
    def input(self) -> str:
        """'own' or 'replicated'."""

    @property
    def shared_split(self) -> int:
        """
        Ranks that share the rows of shared experts among them; 0: every rank takes all tokens.
        """

    @property
    def transfer(self) -> str:
        """'routed' or 'gather'."""

    @property
    def placement(self) -> Placement:
        """Which rank holds which expert."""

    @property
    def alignment(self) -> int:
        """Each expert's first row is a multiple of it."""

    @property
    def capacity(self) -> int:
        """Rows as configured; 0: the default, which capacity_of() returns."""

    @property
    def repeats(self) -> bool:
        """Whether the default capacity has room for repeated experts."""

    @property
    def zero_padding(self) -> bool:
        """Whether padding rows are set to zero."""

    @property
    def lanes(self) -> int:
        """Independent sequences of calls, which may overlap."""

    @property
    def deadline(self) -> float:
        """Seconds a wait may last."""

    @property
    def own_receive_buffers(self) -> bool:
        """Whether the lanes have receive buffers."""

    @property
    def check_calls(self) -> bool:
        """Whether host backends check every call."""

    @property
    def backend(self) -> str:
        """'cpu', 'cuda', 'collective' or 'nvshmem'."""

    @property
    def engine(self) -> str:
        """
        'nccl'; 'mpi' or 'custom', which the group must have brought; or 'automatic'.
        """

    @property
    def memory(self) -> str:
        """
        'host' or 'device'; of a configuration that no exchange has taken also 'automatic'.
        """

    @property
    def hops(self) -> str:
        """
        'one' or 'two'; of a configuration that no exchange has taken also 'automatic'.
        """

    @property
    def window(self) -> int:
        """
        Most messages on their way from a rank to another; 0: the backend's default.
        """

    @property
    def layout(self) -> str:
        """'expert_major', 'expert_padded' or 'rank_major'."""

    @property
    def format(self) -> str:
        """Format of a dispatch that names none; others must have rows no larger."""

    @property
    def combine_type(self) -> str:
        """Type of the rows that combine sends."""

    @property
    def reduction(self) -> str:
        """
        Reduction of a combine that names none; others must need no more staging.
        """

    @property
    def reduction_level(self) -> str:
        """'rank' or 'node'; 'automatic' before an Exchange has chosen."""

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __getstate__(self) -> dict[str, Any]: ...

    def __setstate__(self, state: dict[str, Any], /) -> None: ...

    def __repr__(self) -> str: ...

class Sizes:
    """Memory of one rank's exchange by purpose, in bytes."""

    @property
    def dispatch_staging(self) -> int:
        """Symmetric memory: 2 * lanes * R*T messages."""

    @property
    def combine_staging(self) -> int:
        """
        Symmetric memory: 2 * lanes * T*K rows ('exact', 'unreduced'), T*min(K,R) rows ('partial') or T*R rows (transfer 'gather').
        """

    @property
    def signals(self) -> int:
        """Symmetric memory: flags, counts, refusals."""

    @property
    def results(self) -> int:
        """The lanes' own receive buffers."""

    @property
    def plans(self) -> int:
        """The lanes' plans and working memory."""

    @property
    def messages(self) -> int:
        """
        'collective'; 'cpu', 'cuda' and 'nvshmem' in two hops: what a rank packs, forwards and receives in memory of its own.
        """

    @property
    def total(self) -> int:
        """The sum."""

    def __repr__(self) -> str: ...

def size_of(config: Config, ranks: int | Topology, rank: int = 0) -> Sizes:
    """
    Sizes: exactly what an exchange of this configuration maps on one rank of `ranks`, or of a Topology for ranks on several nodes. Needs no group and allocates nothing.
    """

def capacity_of(config: Config, ranks: int, rank: int = 0) -> int:
    """
    Rows a rank can receive under this configuration (expert_padded: rows of one expert).
    """

def plan_bytes(config: Config, ranks: int) -> int:
    """Bytes of a plan's storage, the same on every rank."""

def load_formats(path: str | os.PathLike[str]) -> list[str]:
    """
    Opens a shared library and registers the formats that it has; returns their names, for Config(format=...).

    docs/guides/own_format.md says how to build one. Every rank loads it. If one of its formats cannot be registered, none
    is. A library that is loaded already is not asked again.
    """

class Topology:
    """
    The nodes of a group: sets of ranks that share memory, numbered in the order of their lowest ranks.
    """

    def __init__(self, node_of_rank: Sequence[int]) -> None:
        """
        `node_of_rank` [R]: ranks with equal numbers, which may be any, are on one node.
        """

    @property
    def ranks(self) -> int:
        """Number of ranks in the group."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""

    @property
    def simulated(self) -> bool:
        """Whether nodes stand for hosts that the ranks do not really run on."""

    def node_of(self, rank: int) -> int:
        """The node of a rank."""

    def local_rank_of(self, rank: int) -> int:
        """The rank's number among the ranks of its node, from 0."""

    def ranks_of(self, node: int) -> list[int]:
        """The ranks of a node, in increasing order."""

    def relay_of(self, source: int, node: int) -> int:
        """
        The rank of `node` that passes on what rank `source` and the node send each other in two hops.
        """

    def __repr__(self) -> str: ...

class Rank:
    """
    One participant of a group. Use it only in the thread that received it.
    """

    @property
    def index(self) -> int:
        """This rank's number, 0 to size - 1."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def same_process(self) -> bool:
        """Whether every rank of the group is a thread of this process."""

    @property
    def topology(self) -> Topology:
        """Which ranks are on which node."""

    @property
    def shares_memory(self) -> bool:
        """
        Whether all ranks share memory, as the backends 'cpu' and 'cuda' need; also on nodes that the group simulates in one process.
        """

    def barrier(self) -> None:
        """
        Blocks until every rank has called it. Collective. Raises TimeoutError or PeerLostError if one does not.
        """

    def all_gather(self, mine: bytes) -> list[bytes]:
        """
        Returns the bytes of every rank, by rank. Collective. UsageError on every rank if lengths differ.
        """

    def __repr__(self) -> str: ...

class Group:
    """The ranks that work together, and how they find each other."""

    @staticmethod
    def threads(ranks: int | Topology, nodes: int = 1) -> Group:
        """
        Ranks are threads of this process; run() starts them. `nodes` simulates nodes of equal size, a Topology in place of the number of ranks nodes of any sizes.
        """

    @staticmethod
    def processes(ranks: int | Topology, nodes: int = 1) -> Group:
        """
        Ranks are processes on this host, forked by run(), which sends back what they return or raise by pickle.

        Call run() before the program starts threads or uses a GPU. What a rank writes to variables stays in its process.
        """

    @staticmethod
    def mpi() -> Group:
        """
        This process is one rank of an MPI job. UnsupportedError if the MPI module was not built.
        """

    @staticmethod
    def launched() -> Group:
        """
        This process is one rank of those that `ferry launch -n RANKS script.py` has started on this host. UsageError if it was started otherwise.
        """

    @staticmethod
    def custom(rank: int, ranks: int, all_gather: Callable[[bytes], Sequence[bytes]], barrier: Callable[[], object], *, all_to_all_v: Callable[[int, memoryview, list[int], list[int], memoryview, list[int], list[int]], object] | None = None, abort: Callable[[], object] | None = None, ordered_lanes: bool = True, default_backend: Literal['cpu', 'cuda', 'collective', 'nvshmem'] = 'cpu', host_id: str = '') -> Group:
        """
        This process, or thread, is one rank; the caller supplies two collective functions.

        all_gather(bytes) returns a list with the bytes of every rank, barrier() waits for all ranks. Ferry calls them on a
        thread of its own; they must not call Ferry.
        `default_backend` is the backend of exchanges that name none. `host_id`: any text; ranks with different texts are treated as
        ranks of different hosts, in place of FERRY_HOST_ID.

        The backend 'collective' moves rows through all_to_all_v(lane, send, send_bytes, send_offsets, receive, receive_bytes,
        receive_offsets), which all ranks pass or none. It is collective: it sends send[o:o + n] with o = send_offsets[p] and
        n = send_bytes[p] to each rank p, fills receive likewise, and returns when both may be used again. send and receive are
        memoryviews of host memory that ends with the call: keep no array of it. The function runs on a thread of Ferry's, must
        not call Ferry, and raises if it fails. abort() makes every blocked call of it raise. `lane` numbers the lanes of all exchanges of the group.
        ordered_lanes=False: lanes may be called in another order on each rank, and from several threads at once.
        """

    @staticmethod
    def torch(process_group: object | None = None) -> Group:
        """
        This process is one rank of a torch.distributed process group; default: the default process group.

        Collective: it makes process groups of its own, in which Ferry's collectives cannot mix with the program's. One of them
        is the transport of the backend 'collective'. The default backend of exchanges is 'cuda' if the given process
        group uses NCCL, else 'cpu'.
        """

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def run(self, body: Callable[[Rank], _Result]) -> list[_Result]:
        """
        Calls body(rank) on every rank that this group starts (threads, processes), or on this process's rank. Blocks.

        Returns a list of what the calls returned. If a rank raises, the waits of the others end with PeerLostError, and run()
        raises the rank's exception, with a note that names the rank and, for processes, holds its traceback. An exception of
        a process that pickle cannot send becomes a RuntimeError with its text. After Ctrl-C the waits of threads end in the same
        way, and run() raises KeyboardInterrupt once every thread has returned. A second Ctrl-C raises KeyboardInterrupt in the
        Python code of the threads; run() leaves behind those that are inside a call that does not return within a second.
        """

    def join(self) -> Rank:
        """
        This process's rank, for groups that do not start their ranks. Exchange(group, ...) calls it.

        The first call is collective and blocks. Raises UsageError for Group.threads() and Group.processes().
        """

    def leave(self) -> None:
        """
        Gives up the joined rank, which leaves the group when no exchange uses it any more.
        """

    def set_deadline(self, seconds: float) -> None:
        """
        Sets how long collectives of the group itself may wait; default: 30 s. Call it before join().
        """

    def __repr__(self) -> str: ...

class Plan:
    """
    The routing of one dispatch: destinations, row positions, counts, drops.

    A plan serves any number of dispatches and combines, in any format, of exchanges that agree on placement and sizes. The
    plan of a call lies in the lane's memory until the lane's next dispatch: copy() it to keep it longer. Its tables are
    arrays of the call's framework, on the exchange's device.
    """

    @property
    def tokens(self) -> int:
        """N, the tokens of this rank; experts in slices: of its slice."""

    @property
    def total(self) -> int:
        """
        Rows on this rank, padding between groups included. With 'cuda' only after wait_total().
        """

    @property
    def counts(self) -> Any:
        """int32 [R, E]: routes from each rank to each expert, drops included."""

    @property
    def tokens_between(self) -> Any:
        """int32 [R, R]: tokens sent from rank s to rank d, at [s, d]."""

    @property
    def destinations(self) -> Any:
        """
        int32 [N, K]: the rank that holds each route's expert; -1 for masked slots.
        """

    @property
    def rows(self) -> Any:
        """int32 [N, K]: each route's row on that rank; -1 if masked or dropped."""

    @property
    def sources(self) -> Any:
        """
        int32 [capacity, 3]: source rank, token and slot of each row on this rank; undefined past the total.
        """

    @property
    def storage(self) -> Any:
        """
        uint8 [bytes]: the plan itself, without pointers. Exchange.plan_over() makes a Plan of it again.
        """

    def set_row_bound(self, rows: int) -> None:
        """
        Asserts that the plan's total is at most `rows`.

        Where only the device knows the total, calls then accept arrays of that many rows instead of `capacity`. If the total is
        larger, the call reads past the end of such an array.
        """

    def copy(self) -> Plan:
        """Returns a copy, which no later dispatch overwrites."""

    def __repr__(self) -> str: ...

def dispatch_layout(ids: ferry._typing.Array, placement: Placement, *, topology: Topology | None = None, stream: Any | None = None) -> tuple[Any, Any, Any, Any | None]:
    """
    (tokens_per_rank, routes_per_expert, token_in_rank, tokens_per_node) of ids [N, K]. Not collective.

    int32 [R]: tokens with an expert on the rank; int32 [E]; bool [N, R]: whether the token has an expert on the rank; int32
    [nodes]: tokens with an expert on the node, or None without `topology`. Slots of -1 and ids out of range are not counted. For ids on a GPU
    the counts are made on `stream`, by default the current one of the ids' framework, without waiting for it.
    """

class ReceiveBuffers:
    """
    The caller's memory for the result of a dispatch.

    parts          an array, or a tuple with one for each part of the format: capacity rows, or for a dispatch by a plan as
                   many as the plan's total; scales in columns: rows rounded up to a multiple of 4, expert_padded those of
                   each group; as tiles: ceil(rows / 128) + G rows of tiles. C-contiguous, or scales in columns with the shape
                   and strides of a result's own. DispatchResult.parts then returns these arrays
    weight         float32 [capacity]; rank_major [capacity, K]
    local_ids      int32 [capacity, K], rank_major only
    group_of_row   int32 [capacity]: the group of every row, -1 on padding; written only if given
    plan           uint8 [plan_bytes(config, ranks)]
    counts         int32 [G]
    row_offsets    int32 [G + 1]; its last element is the total
    dots           float32 [capacity], for a dispatch with dot_rows

    rows           rows that these arrays have room for, instead of the capacity, in a dispatch from ids: such as
                   Exchange.dispatch_counts() tells. Rows past it are not stored. Not with expert_padded, scales in columns
                   or tiles, or dot_rows

    Arrays may be longer along their first dimension. Whatever is None is written to the lane's own memory, which the lane's
    next dispatch overwrites.
    """

    def __init__(self, parts: Any | None = None, *, weight: Any | None = None, local_ids: Any | None = None, group_of_row: Any | None = None, plan: Any | None = None, counts: Any | None = None, row_offsets: Any | None = None, dots: Any | None = None, rows: int = 0) -> None: ...

class DispatchResult:
    """
    The received rows, grouped by expert, as arrays of the call's framework.

    Groups are this rank's experts in local order; for rank_major they are the source ranks. Arrays are as long as the
    exchange's capacity; rows past the total are undefined. The arrays are the lane's memory, which its next dispatch
    overwrites, unless ReceiveBuffers were given.
    """

    @property
    def data(self) -> Any:
        """[capacity, H]; expert_padded [G, capacity, H]: the rows' values."""

    @property
    def scales(self) -> Any:
        """
        fp8, mxfp8, mxfp4, nvfp4: the scales of each row's blocks, [capacity, n]; expert_padded [G, capacity, n]; in columns with strides (1, A) or (n * A, 1, A), A = capacity rounded up to a multiple of 4; as tiles [rows of tiles, tiles, 32, 4, 4], see tile_offsets; else None. n: a row's blocks; of formats other than fp8 rounded up to a multiple of 4, or in columns int32 words of four; packed fp8: int32 words of four.
        """

    @property
    def tile_offsets(self) -> object:
        """
        Scales as tiles: int32 [G + 1], the first row of tiles of each group in `scales`; else None.
        """

    @property
    def parts(self) -> tuple[Any, ...]:
        """
        Tuple of all parts: (values,), (values, scales), with nvfp4-token also the rows' scales, or the raw parts.
        """

    @property
    def counts(self) -> Any:
        """int32 [G]: rows of each group, padding not counted."""

    @property
    def row_offsets(self) -> Any:
        """int32 [G + 1]: first row of each group; the last element is the total."""

    @property
    def total(self) -> Any:
        """
        int32 []: row_offsets[G]. With 'cuda', int(total) waits for the device.
        """

    @property
    def group_expert(self) -> Any:
        """int32 [G]: global expert id of each group; -1 for rank_major."""

    @property
    def source(self) -> Any:
        """
        int32 [capacity, 3]: source rank, token and slot of each row; -1 on padding.
        """

    @property
    def weight(self) -> Any:
        """
        float32 [capacity], rank_major [capacity, K]: each row's router weight; None without weights.
        """

    @property
    def local_ids(self) -> Any:
        """
        rank_major: int32 [capacity, K], the local expert of each slot, or -1; else None.
        """

    @property
    def group_of_row(self) -> Any:
        """
        int32 [capacity], the group of each row, if ReceiveBuffers.group_of_row was given; else None.
        """

    @property
    def dots(self) -> Any:
        """
        float32 [capacity], dot(token, dot_rows[row]), if dot_rows was given; else None.
        """

    @property
    def plan(self) -> Plan:
        """The Plan of the call: give it to combine."""

    @property
    def groups(self) -> int:
        """G, the number of groups."""

    @property
    def capacity(self) -> int:
        """Rows there is room for; expert_padded: rows of one expert."""

    @property
    def call(self) -> int:
        """Call number on the lane."""

    def wait_total(self) -> int:
        """
        Returns the total as an int.

        With 'cuda' it waits, `deadline` seconds at most, until the call has written the total to pinned memory. The call does
        that while rows may still be on their way, so this is sooner than int(total).
        """

    def received_rows(self) -> Any:
        """
        [total, H]: the rows of `data` that the call has received, padding between groups included.

        Waits as wait_total() does. Not with expert_padded.
        """

    def __repr__(self) -> str: ...

class Exchange:
    """
    Dispatches tokens to experts and combines their outputs, for one configuration.

    Exchange(group, experts=E, top_k=K, hidden=H, max_tokens=T, ...) takes the settings of Config; Exchange(group, config)
    takes a Config. `group` is a Group, which is joined, or the Rank that Group.run() passes to its function.

    Collective: every rank of the group constructs the exchange and issues the same operations on a lane in the same order.
    Blocking: with the backend 'cpu' a call blocks, without the GIL, until the peers have taken part, for
    `deadline` seconds at most. With 'cuda' a call enqueues its work and returns.
    Device and stream: with 'cuda' the rank works on the thread's current GPU, or on `device`; a call works on the current
    stream of its arrays' framework, or on `stream`.
    Threads: different lanes may be used from different threads; one lane runs one call at a time.

    Raises UsageError and OverflowError, which leave the exchange usable; TimeoutError and PeerLostError are final for the
    group. If one rank's arguments are wrong, its peers' calls end with a UsageError too. A `lane` that does not exist is
    an exception: there the peers wait for the deadline.
    Ctrl-C in the main thread ends a wait with KeyboardInterrupt, which is final for the group: the peers get PeerLostError.
    With 'cuda', Python sees the signal when the call returns.
    """

    @overload
    def __init__(self, group: Group | Rank, config: Config, *, device: int | None = None) -> None: ...
    @overload
    def __init__(self, group: Group | Rank, *, device: int | None = None, experts: int, top_k: int, hidden: int, max_tokens: int, backend: Literal['cpu', 'cuda', 'collective', 'nvshmem'] = ..., engine: Literal['automatic', 'mpi', 'custom', 'nccl'] = 'automatic', memory: Literal['automatic', 'host', 'device'] = 'automatic', hops: Literal['automatic', 'one', 'two'] = 'automatic', window: int = 0, shared_experts: int = 0, input: Literal['own', 'replicated'] = 'own', shared_split: int = 0, transfer: Literal['routed', 'gather'] = 'routed', placement: Placement = ..., layout: Literal['expert_major', 'expert_padded', 'rank_major'] = 'expert_major', alignment: int = 1, capacity: int = 0, repeats: bool = False, zero_padding: bool = False, format: str = 'bf16', combine_type: Literal['bf16', 'fp16', 'fp32'] = 'bf16', reduction: Literal['partial', 'exact', 'unreduced'] = 'partial', reduction_level: Literal['automatic', 'rank', 'node'] = 'automatic', lanes: int = 1, deadline: float = 30.0, own_receive_buffers: bool = True, check_calls: bool = True) -> None: ...

    @property
    def config(self) -> Config:
        """The Config, with every default filled in."""

    @property
    def rank(self) -> int:
        """This rank's number, 0 to ranks - 1."""

    @property
    def ranks(self) -> int:
        """R, the number of ranks."""

    @property
    def sizes(self) -> Sizes:
        """Sizes of the memory that this rank has mapped."""

    @property
    def capacity(self) -> int:
        """Rows this rank can receive (expert_padded: rows of one expert)."""

    @property
    def plan_bytes(self) -> int:
        """Bytes of a plan's storage."""

    def plan_over(self, storage: ferry._typing.Array, tokens: int | None = None) -> Plan:
        """
        A Plan over storage that holds one: uint8 [plan_bytes(config, ranks)]. Not collective.

        `tokens` is its N, needed where the storage is device memory.
        """

    def metadata(self, count: int | ferry._typing.Array, *, lane: int = 0, stream: Any | None = None, out: ferry._typing.Array | None = None) -> Any:
        """
        [sum, prefix, maximum] of the ranks' counts, int32 [3]; prefix is the sum over lower ranks. Collective.

        `count` is a number, or with the backend 'cuda' an int32 [1], read when the call runs. They are written to `out`, int32
        [3], which is returned; without it to an array whose address is fixed for the lane.
        """

    def dispatch_counts(self, ids: ferry._typing.Array, *, lane: int = 0, stream: Any | None = None) -> tuple[int, list[int], list[int]]:
        """
        (total, routes, tokens) of a dispatch of these ids, without sending rows. Collective. Blocks.

        total: rows that the dispatch delivers here; routes: to each expert of this rank, from all ranks; tokens: N of every
        rank. For ReceiveBuffers(rows=total). With 'cuda' it waits for the work before it on `stream`, and cannot be captured.
        """

    def refuse(self, reason: str, *, lane: int = 0, stream: Any | None = None, operation: Literal['dispatch', 'combine', 'metadata', 'route_values', 'dispatch_counts', 'all_gather_v', 'reduce_scatter_v'] = 'dispatch') -> None:
        """
        Takes part in the lane's next call by refusing it: the peers' call ends with a UsageError that says `reason`.

        `operation` is what the peers call. For code between its caller and the exchange that finds out that it cannot make the
        call.
        """

    def check(self, lane: int = 0) -> None:
        """
        Raises what the lane's calls found since the last check: BadIdError, OverflowError, BadSourceError.

        With 'cuda' also what ended a call. Not collective; does not wait for the device.
        """

    def synchronize(self, lane: int = 0, stream: Any | None = None) -> None:
        """
        Blocks until the stream's work is done; raises what ended a call of the lane on the device.
        """

    def last_dispatch_result(self, lane: int = 0) -> DispatchResult:
        """
        The DispatchResult of the lane's last dispatch, also after it raised OverflowError or BadIdError.

        Raises UsageError if that dispatch delivered none.
        """

    def load_counts(self) -> ferry._counts.LoadCounts:
        """
        LoadCounts: routes to every expert and rank so far, the same on every rank.
        """

    def wire_counts(self) -> ferry._counts.WireCounts:
        """
        WireCounts: bytes and messages that this rank has written to other ranks.
        """

    def destroy(self) -> None:
        """
        Frees the buffers, as soon as no array points into them. Not collective.

        Later calls raise UsageError.
        """

    def __enter__(self) -> Exchange: ...

    def __exit__(self, *exception: object) -> None: ...

    def __repr__(self) -> str: ...

    def dispatch(self, tokens: ferry._typing.Array | Sequence[ferry._typing.Array], ids: ferry._typing.Array | Plan, weights: ferry._typing.Array | None = None, *, format: str | None = None, lane: int = 0, sm_limit: int = 0, memory: ReceiveBuffers | None = None, apply_weights: bool = False, dot_rows: ferry._typing.Array | None = None, count: ferry._typing.Array | None = None, global_scale: float | ferry._typing.Array | None = None, input_scales: ferry._typing.Array | None = None, stream: Any | None = None) -> DispatchResult:
        """
        Sends every token to the ranks of its experts; returns the received rows, grouped by expert. Collective.

        tokens         [N, H] of bfloat16, float16 or float32. The step from row to row may be larger than H, in multiples of
                       16 bytes. For raw formats a tuple of up to four arrays [N, ...], whose bytes are moved unchanged
        ids            int32 or int64 [N, K], C-contiguous; -1 masks a slot. Or a Plan: its routes are used again
        weights        float32 [N, K], C-contiguous: router weights, sent with the rows
        format         of this call, see Config; default: the exchange's
        memory         ReceiveBuffers for the result; default: the lane's own memory
        apply_weights  multiply the received values by their weight
        global_scale   format 'nvfp4': g, a number or float32 [1], the same on all ranks; on GPUs an array there; default
                       1. Values are element * scale * g
        input_scales   formats 'fp8', 'mxfp8' and 'nvfp4': float32 [E + S] where the tokens lie, a scale of each expert, shared
                       ones last. Tokens travel as they are; each rank encodes the rows it receives with its experts' scales
        dot_rows       [rows, H] of combine_type: result.dots[row] = dot(token, dot_rows[row]), before apply_weights
        count          'cuda': int32 [1] in device memory, N as read when the call runs; the rows of `tokens` bound it
        sm_limit       'cuda': the most blocks the call uses at once; 0: no limit
        stream         'cuda': default the current stream of the arrays' framework

        Host backends block, without the GIL, until the peers have taken part, for `deadline` seconds at most; 'cuda' does not
        block.
        Raises UsageError for arguments that do not fit; the peers' calls end with it too, unless the mistake is a bad
        `lane`, or a `global_scale` or a scale of `input_scales` with which a block cannot be encoded. Raises BadIdError for
        ids out of range and OverflowError for rows past the capacity, which are dropped: both after the call, whose result
        last_dispatch_result() then returns.
        """

    def dispatch_send(self, tokens: ferry._typing.Array | Sequence[ferry._typing.Array], ids: ferry._typing.Array | Plan, weights: ferry._typing.Array | None = None, *, format: str | None = None, lane: int = 0, sm_limit: int = 0, memory: ReceiveBuffers | None = None, apply_weights: bool = False, dot_rows: ferry._typing.Array | None = None, count: ferry._typing.Array | None = None, global_scale: float | ferry._typing.Array | None = None, input_scales: ferry._typing.Array | None = None, stream: Any | None = None) -> None:
        """
        The send phase of dispatch, with its arguments, which may be reused when it returns. Does not wait for peers.
        """

    def dispatch_receive(self, *, lane: int = 0, stream: Any | None = None) -> DispatchResult:
        """
        The receive phase of dispatch: returns its result. May run in another thread or on another stream.
        """

    def combine(self, outputs: ferry._typing.Array | None, plan: Plan, *, row_weights: ferry._typing.Array | None = None, topk_weights: ferry._typing.Array | None = None, reduction: Literal['partial', 'exact', 'unreduced'] | None = None, row_values: ferry._typing.Array | None = None, result: ferry._typing.Array | None = None, shared_outputs: ferry._typing.Array | None = None, residual: ferry._typing.Array | None = None, scale: float = 1.0, lane: int = 0, sm_limit: int = 0, stream: Any | None = None) -> Any:
        """
        Returns the experts' outputs to their source ranks and sums them by token. Collective.

        outputs        [rows, H] of bfloat16, float16 or float32, in the row order of the dispatch. The step from row to row may
                       be larger than H, in multiples of 16 bytes. None: only row_values are returned to their source ranks
        plan           of the dispatch whose rows these are
        row_weights    float32 [rows]: a weight for each row, as DispatchResult.weight
        topk_weights   float32 [N, K] on the source rank, instead of row_weights. With neither, every weight is 1
        reduction      'partial', 'exact' or 'unreduced'; default: the exchange's
        row_values     float32 [rows]: one more number for each row
        result         [N, H], unreduced [N, K, H], to write to; default: a new array of outputs' type
        shared_outputs [shared_experts, N, H] of the result's type, to which the outputs of the shared experts are written instead
                       of being added; needed with 'unreduced'
        residual       [N, H] of the result's type: the result is rounded, multiplied by `scale` and added to it in fp32, and rounded
        scale          again. Not with 'unreduced'
        sm_limit       'cuda': the most blocks the call uses at once; 0: no limit
        stream         'cuda': default the current stream of the arrays' framework

        Returns the result; with row_values the pair (result, route_values), route_values float32 [N, K], 0 where a slot is masked
        or its row was dropped. Rows past the plan's total are never read.
        Host backends block, without the GIL, until the peers have taken part, for `deadline` seconds at most; 'cuda' does not
        block.
        Raises UsageError for arguments that do not fit; the peers' calls end with it too, unless the mistake is a bad
        `lane`. Raises BadSourceError for a damaged plan.
        """

    def combine_send(self, outputs: ferry._typing.Array | None, plan: Plan, *, row_weights: ferry._typing.Array | None = None, topk_weights: ferry._typing.Array | None = None, reduction: Literal['partial', 'exact', 'unreduced'] | None = None, row_values: ferry._typing.Array | None = None, result: ferry._typing.Array | None = None, shared_outputs: ferry._typing.Array | None = None, residual: ferry._typing.Array | None = None, scale: float = 1.0, lane: int = 0, sm_limit: int = 0, stream: Any | None = None) -> None:
        """
        The send phase of combine, with its arguments. `outputs` may be reused when it returns.

        Raises UsageError for topk_weights with the reduction 'partial', which need a round trip of their own.
        """

    def combine_receive(self, *, lane: int = 0, stream: Any | None = None) -> Any:
        """The receive phase of combine: returns what combine returns."""

    def route_values(self, values: ferry._typing.Array, plan: Plan, *, lane: int = 0, stream: Any | None = None) -> Any:
        """
        Sends one number a route, float32 [N, K], to the route's row: returns float32 [rows], 0 on padding. Collective.
        """

    def combine_backward(self, d_result: ferry._typing.Array, plan: Plan, topk_weights: ferry._typing.Array, outputs: ferry._typing.Array, *, format: str | None = None, lane: int = 0, sm_limit: int = 0, memory: ReceiveBuffers | None = None, stream: Any | None = None) -> tuple[DispatchResult, Any]:
        """
        Gradients of combine: the pair (DispatchResult, d_weights). Collective.

        d_result [N, H] is dispatched by the plan and each row multiplied by its weight in topk_weights, float32 [N, K].
        d_weights, float32 [N, K], holds the dot products of d_result with `outputs`, the rows that combine was given: dense, of
        combine_type. Other arguments as dispatch.
        """

    def all_gather_v(self, rows: ferry._typing.Array, out: ferry._typing.Array, *, count: ferry._typing.Array | None = None, lane: int = 0, stream: Any | None = None) -> Any:
        """
        Copies the rows of all ranks into `out`, in rank order, and returns its rows that were written. Collective.

        `rows` is [n, ...] of any type; every rank has its own n, 0 too. `out` is [sum of n or more, ...] of the same type; rows
        past the sum are not written. On device memory the host does not know the sum, and all of `out` is returned; `count`, an int32 array [1] there, may
        hold n instead, at most the number of `rows`.
        """

    def reduce_scatter_v(self, rows: ferry._typing.Array, out: ferry._typing.Array, *, count: ferry._typing.Array | None = None, lane: int = 0, stream: Any | None = None) -> Any:
        """
        Adds the ranks' `rows`, writes this rank's rows of the sum to `out`, and returns `out`. Collective.

        `rows` is [sum of n, H] of bfloat16, float16 or float32 on every rank, `out` [n, H] of the same type, with this rank's
        n. The first rows of the sum belong to rank 0, and so on. Each value is added in fp32, in rank order from +0, and
        rounded once. `count` as in all_gather_v(); `rows` may then have more rows than the sum.
        """

class ProgramStep:
    """A step of a Program."""

    @property
    def kind(self) -> str:
        """Such as 'dispatch' or 'call'."""

    @property
    def name(self) -> str:
        """As errors name the step: 'rows (dispatch)'."""

    @property
    def inputs(self) -> list[str]:
        """Names of the values that it takes."""

    @property
    def outputs(self) -> list[tuple[str, str]]:
        """(name, kind) of each value that it makes."""

    @property
    def function(self) -> str:
        """'call': name of the caller's function."""

    @property
    def exchange(self) -> str:
        """Name of its exchange; '': the one without a name."""

    @property
    def lane(self) -> int: ...

    @property
    def index(self) -> int:
        """'part': which part ..."""

    @property
    def of(self) -> int:
        """... of how many."""

    @property
    def stream(self) -> int:
        """On GPUs: number of its stream; 0: the caller's."""

    @property
    def sm_limit(self) -> int:
        """
        dispatch, combine and their send phases on GPUs: the most thread blocks; 0: the lane's share.
        """

    @property
    def after(self) -> list[str]:
        """
        On GPUs: values of other streams that must be there before the step begins.
        """

class Program:
    """
    A layer, or several, as a value: steps over named values. Program(text) reads the text form and checks it.

    str() gives the text back. Programs are equal if their texts are. ferry.Evaluator runs them; docs/programs.md
    defines steps, values and text. Raises UsageError, which names the line or the step, the value and the remedy.
    """

    def __init__(self, text: str) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def inputs(self) -> list[tuple[str, str]]:
        """(name, kind) of each input."""

    @property
    def steps(self) -> list[ProgramStep]:
        """In the order in which they run."""

    @property
    def outputs(self) -> list[str]:
        """Names of the values that a run returns."""

    @overload
    def check(self, config: Config) -> None: ...

    @overload
    def check(self, configs: Mapping[str, Config]) -> None:
        """
        Says which steps exchanges of this configuration, or of these by name, cannot carry out. Local.

        Raises UsageError for an exchange or lane that is not there and for options that a step cannot have, UnsupportedError for
        a step that such an exchange does not have. Both name the step.
        """

    def overlap(self, batches: int) -> Program:
        """
        The program in micro-batches: tokens [i*N/n, (i+1)*N/n) of each rank, on lanes of their own.

        The micro-batches take turns before each receive phase, so that messages of one are on their way while the functions of
        another run. On GPUs their send phases, and their experts, come one after the other. The exchange needs `batches` times
        as many lanes. Results have the bytes of the plain program if nothing is dropped and the functions treat each row alone.
        Raises UsageError where inputs are not tokens, ids or weights, or outputs not tokens.
        """

    def svg(self) -> str:
        """A drawing: a box for each step, a column for each lane."""

    def __str__(self) -> str: ...

    def __repr__(self) -> str: ...

    def __eq__(self, other: object | None) -> bool: ...

    def __hash__(self) -> int: ...

class Trace:
    """Which experts a router chose, token by token, recorded or synthesised."""

    @property
    def name(self) -> str:
        """The name given to open_trace."""

    @property
    def source(self) -> str:
        """Where it comes from, in words."""

    @property
    def layers(self) -> int:
        """Number of layers."""

    @property
    def tokens(self) -> int:
        """Tokens of one layer."""

    @property
    def top_k(self) -> int:
        """K, experts of a token."""

    @property
    def experts(self) -> int:
        """E, the number of experts."""

    @property
    def sequence_lengths(self) -> list[int]:
        """Tokens of each sequence, in order; empty if they are not known."""

    @property
    def ids(self) -> Any:
        """int32 [layers, tokens, K]: expert ids, -1 for a masked slot. A copy."""

    @property
    def weights(self) -> Any:
        """float32 [layers, tokens, K]: router weights. A copy."""

    def partition(self, layer: int, rank: int, ranks: int, tokens_per_rank: int, step: int = 0) -> tuple[Any, Any]:
        """
        The tokens of one rank in one call: (ids int32, weights float32), both [tokens_per_rank, K]. Step s + 1 continues where step s ends.
        """

    def expert_counts(self, layer: int) -> Any:
        """int64 [E]: routes to each expert in a layer."""

    def save(self, prefix: str) -> None:
        """
        Writes PREFIX.ids.npy and PREFIX.weights.npy, which open_trace reads back.
        """

    def __repr__(self) -> str: ...

def open_trace(name: str, directory: str = '', experts: int = 0) -> Trace:
    """
    Opens a routing trace.

    `name` is 'synth:decode', 'synth:prefill' or 'synth:uniform', each also with '-grouped' and with ':key=value,...'; or the
    name of a recorded trace in `directory` (default: environment variable FERRY_TRACES); or a path that ends in .npy.
    """

class LoadStatistics:
    """
    How unevenly experts are chosen. `max` to `min` are loads divided by the mean load.
    """

    @property
    def routes(self) -> int:
        """Sum of all loads."""

    @property
    def max(self) -> float:
        """The largest load."""

    @property
    def p99(self) -> float:
        """99th percentile."""

    @property
    def p90(self) -> float:
        """90th percentile."""

    @property
    def p50(self) -> float:
        """Median."""

    @property
    def p10(self) -> float:
        """10th percentile."""

    @property
    def min(self) -> float:
        """The smallest load."""

    @property
    def sigma_ln(self) -> float:
        """Standard deviation of ln(load), loads above 0."""

    @property
    def gini(self) -> float:
        """Gini coefficient."""

    @property
    def idle(self) -> int:
        """Experts without a route."""

    def __repr__(self) -> str: ...

def load_statistics(counts: Any) -> LoadStatistics:
    """
    LoadStatistics of the routes to each expert, int64 [E]. UsageError for no experts or a sum of 0.
    """

def rank_counts(counts: Any, placement: Placement) -> Any:
    """
    int64 [R]: routes to each rank, for routes to each expert, `counts` int64 [E].
    """

class EventHandle:
    """
    An event recorded on the current stream. Without PyTorch or a GPU calls are synchronous, and it is empty.
    """

    def __init__(self) -> None: ...

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event."""

class LowLatencyHandle:
    """
    (src_info, layout_range, M, H, E) of a low-latency dispatch; the first two are computed on first access.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...

    @property
    def exchange(self) -> Exchange:
        """The Exchange that the dispatch used."""

    @property
    def plan(self) -> Plan:
        """The Plan of the dispatch."""

    @property
    def shape(self) -> tuple[int, int]:
        """(L, R*M)."""

class ReceiveHook:
    """
    Runs the receive phase of a low-latency call, once, on the stream that was current when the call was made.
    """

    def __call__(self) -> None: ...

class NormalHandle:
    """
    (rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, recv_src_idx, is_token_in_rank, send_head) of a dispatch; between nodes (is_token_in_rank, rdma_channel_prefix_matrix, gbl_channel_prefix_matrix, recv_rdma_channel_prefix_matrix, recv_rdma_rank_prefix_sum, recv_gbl_channel_prefix_matrix, recv_gbl_rank_prefix_sum, recv_src_meta, send_rdma_head, send_nvl_head). Each is computed on first access.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...

    @property
    def exchange(self) -> Exchange:
        """The Exchange that the dispatch used."""

    @property
    def plan(self) -> Plan:
        """The Plan of the dispatch."""

    @property
    def rows(self) -> int:
        """Received rows, or with num_worst_tokens their bound."""

    @property
    def is_token_in_rank(self) -> Any:
        """As given to the dispatch."""

    @property
    def tokens_of_ranks(self) -> list[int]:
        """
        N of every rank; empty after num_worst_tokens, where the host does not know them.
        """

    @property
    def channels(self) -> int:
        """C of the matrices by channel."""

    @property
    def topology(self) -> Topology:
        """The nodes of the group."""

    @property
    def node_routes(self) -> Any:
        """
        Between nodes: int32 [R, 1 + T or more], every rank's N, then for each of its tokens the ranks of this node that it goes to, as bits by local rank. None if a node has more than 31 ranks.
        """
