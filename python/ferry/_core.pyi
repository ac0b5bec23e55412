"""The compiled part of ferry; import ferry instead."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import ferry._counts


_Result = TypeVar("_Result")
__version__: str

MAX_TOP_K: int = 32

MAX_PARTS: int = 4

def has_cuda() -> bool:
    """
    Whether this build has the backend for GPUs. It says nothing about the machine.
    """

class Placement:
    """Which rank holds which expert. Immutable."""

    @staticmethod
    def blocks(experts: int, ranks: int) -> Placement:
        """
        Blocks of neighbouring experts; the first experts % ranks ranks hold one more.
        """

    @staticmethod
    def table(places: Sequence[tuple[int, int]], ranks: int, version: int = 0) -> Placement:
        """
        Any table: (rank, local expert) of every expert. UsageError for holes and double places.
        """

    @property
    def experts(self) -> int:
        """how many experts it places"""

    @property
    def ranks(self) -> int:
        """on how many ranks"""

    @property
    def version(self) -> int:
        """the number given with the table"""

    def place(self, expert: int) -> tuple[int, int]:
        """(rank, local expert) of an expert."""

    def experts_of(self, rank: int) -> list[int]:
        """The global ids of a rank's experts, in local order."""

    def __repr__(self) -> str: ...

class Config:
    """
    The configuration of an exchange, the same on every rank.

    Config(experts=E, top_k=K, hidden=H, max_tokens=T, ...), with at least these four. The others:

    backend        'cpu', 'cuda' or 'reference'; in a group whose torch.distributed backend is NCCL 'cuda', else 'cpu'
    placement      a Placement; default: Placement.blocks(experts, ranks)
    layout         'expert_major', 'expert_padded' or 'rank_major'
    alignment      experts start at multiples of it; default 1
    capacity       rows a rank can receive (expert_padded: rows an expert); default 0: any routing fits
    repeats        the default capacity also holds tokens that list an expert more than once
    zero_padding   padding rows become zero
    format         'bf16', 'fp16', 'fp32', 'fp8' with any of -columns, -pow2, -packed, or 'raw:BYTES+BYTES...'
    combine_type   'bf16', 'fp16' or 'fp32': type of the experts' rows that combine carries
    reduction      'partial', 'exact' or 'unreduced': the largest combine
    lanes          how many calls may be in flight; default 1
    deadline       seconds a wait may last; default 30
    own_receive_buffers   False: every dispatch brings memory for its arrivals
    check_calls    host backends call check() at the end of every call; default True

    UsageError names a setting that is missing, does not exist or does not fit. What depends on the number of ranks is
    checked when an exchange is made or its size is asked for.
    """

    def __init__(self, *, experts: int, top_k: int, hidden: int, max_tokens: int, backend: str = ..., placement: Placement = ..., layout: str = 'expert_major', alignment: int = 1, capacity: int = 0, repeats: bool = False, zero_padding: bool = False, format: str = 'bf16', combine_type: str = 'bf16', reduction: str = 'partial', lanes: int = 1, deadline: float = 30.0, own_receive_buffers: bool = True, check_calls: bool = True) -> None: ...

    @property
    def experts(self) -> int:
        """E"""

    @property
    def top_k(self) -> int:
        """K, 1 to 32"""

    @property
    def hidden(self) -> int:
        """H, columns of a token"""

    @property
    def max_tokens(self) -> int:
        """T, most tokens a rank may have in a call"""

    @property
    def placement(self) -> Placement:
        """which rank holds which expert"""

    @property
    def alignment(self) -> int:
        """experts start at multiples of it"""

    @property
    def capacity(self) -> int:
        """rows as configured; 0: any routing fits"""

    @property
    def repeats(self) -> bool:
        """see the class"""

    @property
    def zero_padding(self) -> bool:
        """see the class"""

    @property
    def lanes(self) -> int:
        """independent channels"""

    @property
    def deadline(self) -> float:
        """seconds a wait may last"""

    @property
    def own_receive_buffers(self) -> bool:
        """see the class"""

    @property
    def check_calls(self) -> bool:
        """see the class"""

    @property
    def backend(self) -> str:
        """see the class"""

    @property
    def layout(self) -> str:
        """see the class"""

    @property
    def format(self) -> str:
        """see the class"""

    @property
    def combine_type(self) -> str:
        """see the class"""

    @property
    def reduction(self) -> str:
        """see the class"""

    def __repr__(self) -> str: ...

class Sizes:
    """Bytes of one rank's exchange, by what they are for."""

    @property
    def dispatch_staging(self) -> int:
        """symmetric: 2 * lanes * R*T messages"""

    @property
    def combine_staging(self) -> int:
        """symmetric: 2 * lanes * T*K or T*min(K,R) rows"""

    @property
    def signals(self) -> int:
        """symmetric: flags, counts, refusals"""

    @property
    def arrivals(self) -> int:
        """owned outputs of all lanes"""

    @property
    def plans(self) -> int:
        """plans and working memory of the lanes"""

    @property
    def total(self) -> int:
        """the sum"""

    def __repr__(self) -> str: ...

def size_of(config: Config, ranks: int, rank: int = 0) -> Sizes:
    """
    Exactly what an exchange of this configuration maps on one rank of `ranks`. Allocates nothing.
    """

def capacity_of(config: Config, ranks: int, rank: int = 0) -> int:
    """Rows a rank can receive (expert_padded: rows of one expert)."""

def plan_bytes(config: Config, ranks: int) -> int:
    """Bytes of a plan's storage, on every rank."""

class Rank:
    """One participant of a group. Use it from the thread it was given to."""

    @property
    def index(self) -> int:
        """0 to size - 1"""

    @property
    def size(self) -> int:
        """ranks of the group"""

    @property
    def same_process(self) -> bool:
        """whether every rank is a thread of this process"""

    def barrier(self) -> None:
        """
        Collective: returns when every rank has called. TimeoutError or PeerLostError when one does not.
        """

    def all_gather(self, mine: bytes) -> list[bytes]:
        """
        Collective: the bytes of every rank, by rank; all give equally many, else each gets UsageError.
        """

    def __repr__(self) -> str: ...

class Group:
    """All ranks that work together, and how they find one another."""

    @staticmethod
    def threads(ranks: int, nodes: int = 1) -> Group:
        """Ranks as threads of this process: run() starts them."""

    @staticmethod
    def mpi() -> Group:
        """
        This process is one rank of an MPI job. UnsupportedError where the MPI module was not built.
        """

    @staticmethod
    def custom(rank: int, ranks: int, all_gather: Callable[[bytes], Sequence[bytes]], barrier: Callable[[], object], *, default_backend: str = 'cpu') -> Group:
        """
        This process (or thread) is one rank, and brings the means to meet: all_gather(bytes) returns
        the bytes of every rank in a list, barrier() waits for all. Ranks share this host.
        """

    @staticmethod
    def torch(process_group: object | None = None) -> Group:
        """
        This process is one rank of a torch.distributed process group (default: the world's).
        """

    @property
    def size(self) -> int:
        """ranks of the group"""

    def run(self, body: Callable[[Rank], _Result]) -> list[_Result]:
        """
        Calls body(rank) as every rank this group starts (threads) or as this process's rank, and returns
        what the calls returned, in a list. An exception of a rank is raised here, and the others' waits end
        with PeerLostError. So do those of threads after Ctrl-C; it is raised when every body has ended.
        """

    def join(self) -> Rank:
        """
        This process's rank, for groups that start none; Exchange(group, ...) calls it. The first call is
        collective.
        """

    def leave(self) -> None:
        """Gives the joined rank up; it leaves when no exchange uses it any more."""

    def set_deadline(self, seconds: float) -> None:
        """How long collectives of the group itself wait; default 30."""

    def __repr__(self) -> str: ...

class Plan:
    """
    All that follows from ids and placement: destinations, rows, counts, drops.

    It serves any number of dispatches and combines of exchanges that agree on placement and sizes, in any format. The plan
    of a call lies in the lane's memory until the lane's next dispatch: copy() it to keep it longer. Its tables are arrays
    of the call's framework, on the exchange's device.
    """

    @property
    def tokens(self) -> int:
        """N of this rank"""

    @property
    def total(self) -> int:
        """
        Rows on this rank, padding between groups included. On devices only after the host has read it.
        """

    @property
    def counts(self) -> Any:
        """int32 [R, E]: routes of every rank to every expert, drops included."""

    @property
    def tokens_between(self) -> Any:
        """int32 [R, R]: tokens that rank s sends to rank d."""

    @property
    def destinations(self) -> Any:
        """int32 [N, K]: the rank of a route's expert, -1 for masked slots."""

    @property
    def rows(self) -> Any:
        """int32 [N, K]: a route's row there, -1 if masked or dropped."""

    @property
    def sources(self) -> Any:
        """
        int32 [most rows, 3]: rank, token and slot of every row here, as far as there are rows.
        """

    @property
    def storage(self) -> Any:
        """
        uint8 [bytes]: the plan itself, without pointers: to be kept, and brought back by
        Exchange.plan_over().
        """

    def vouch(self, rows: int) -> None:
        """
        The caller's word that the plan's total is at most this, so that arrays of that many rows are taken where
        only the device knows the total. If it is more, rows past their end are read.
        """

    def copy(self) -> Plan:
        """A plan of its own, independent of the lane's next dispatch."""

    def __repr__(self) -> str: ...

class ReceiveBuffers:
    """
    Memory of the caller for what dispatch returns.

    parts          an array, or a tuple of one for each part of the format: capacity rows, for a dispatch by a plan its
                   total suffices. They are what the arrivals then hand out
    weight         float32 [capacity]; rank_major [capacity, K]
    local_ids      int32 [capacity, K], rank_major
    group_of_row   int32 [capacity]: the group of every row, -1 on padding; written only if given
    plan           uint8 [plan_bytes(config, ranks)]
    counts         int32 [G]
    row_offsets    int32 [G + 1], and so the total
    dots           float32 [capacity], for a dispatch with dot_rows

    What is not given lies in the lane's memory, which its next dispatch overwrites.
    """

    def __init__(self, parts: Any | None = None, *, weight: Any | None = None, local_ids: Any | None = None, group_of_row: Any | None = None, plan: Any | None = None, counts: Any | None = None, row_offsets: Any | None = None, dots: Any | None = None) -> None: ...

class DispatchResult:
    """
    What dispatch returns: arrays of the framework that went in.

    Groups are this rank's experts in local order; for rank_major the source ranks. Arrays have room for all rows there may
    be; rows past the total are never written or read. They lie in the lane's memory until its next dispatch, unless
    memory was given.
    """

    @property
    def data(self) -> Any:
        """[capacity, H], or [L, capacity, H] in the padded layout: the rows."""

    @property
    def scales(self) -> Any:
        """fp8: the scales of every row's blocks, [capacity, blocks]; else None."""

    @property
    def parts(self) -> tuple[Any, ...]:
        """tuple of all parts: values, scales, or the raw ones."""

    @property
    def counts(self) -> Any:
        """int32 [G]: rows of a group, padding not counted."""

    @property
    def row_offsets(self) -> Any:
        """int32 [G + 1]: first row of a group."""

    @property
    def total(self) -> Any:
        """
        int32 []: row_offsets[G]. int(total) waits for the device, if there is one.
        """

    @property
    def group_expert(self) -> Any:
        """int32 [G]: global id of a group's expert; -1 for rank_major."""

    @property
    def source(self) -> Any:
        """int32 [capacity, 3]: rank, token and slot of every row; -1 on padding."""

    @property
    def weight(self) -> Any:
        """
        float32 [capacity], rank_major [capacity, K]: the weights that travelled; None without.
        """

    @property
    def local_ids(self) -> Any:
        """rank_major: int32 [capacity, K]: local expert of every slot, or -1."""

    @property
    def group_of_row(self) -> Any:
        """int32 [capacity] if memory was given for it."""

    @property
    def dots(self) -> Any:
        """float32 [capacity] if dot_rows was given."""

    @property
    def plan(self) -> Plan:
        """the Plan of the call"""

    @property
    def groups(self) -> int:
        """G"""

    @property
    def capacity(self) -> int:
        """rows there is room for; padded layout: rows an expert"""

    @property
    def call(self) -> int:
        """call number on the lane"""

    def wait_total(self) -> int:
        """
        The total as a number. On devices it waits for the call's own word in pinned memory, which comes while
        rows may still be arriving, and at most as long as the exchange's deadline.
        """

    def __repr__(self) -> str: ...

class Exchange:
    """
    The buffers of one configuration on one rank.

    Exchange(group, experts=E, top_k=K, hidden=H, max_tokens=T, ...) with the settings of Config, or Exchange(group, config).
    `group` is a Group, which is joined, or the Rank that Group.run() hands out. Construction and every operation are
    collective: all ranks call the same operations of a lane in the same order. UsageError and OverflowError leave the
    exchange usable; TimeoutError and PeerLostError are final for the group.

    With the backends 'cpu' and 'reference' a call blocks until the peers have come, for `deadline` seconds at most,
    without the interpreter's lock. Ctrl-C in the main thread ends such a wait with KeyboardInterrupt; that too is final
    for the group, and the peers get PeerLostError. With 'cuda' it is seen when a call returns. What a rank finds wrong
    with its arguments ends the peers' call as well, except a `lane` that does not exist and a keyword that is misspelt:
    then the peers wait for the deadline.

    With the backend 'cuda' the rank's device is the thread's current one, or `device`; work goes to the current stream of
    the arrays' framework, or to `stream`.
    """

    @overload
    def __init__(self, group: Group | Rank, config: Config, *, device: int | None = None) -> None: ...
    @overload
    def __init__(self, group: Group | Rank, *, device: int | None = None, experts: int, top_k: int, hidden: int, max_tokens: int, backend: str = ..., placement: Placement = ..., layout: str = 'expert_major', alignment: int = 1, capacity: int = 0, repeats: bool = False, zero_padding: bool = False, format: str = 'bf16', combine_type: str = 'bf16', reduction: str = 'partial', lanes: int = 1, deadline: float = 30.0, own_receive_buffers: bool = True, check_calls: bool = True) -> None: ...

    @property
    def config(self) -> Config:
        """with every default filled in"""

    @property
    def rank(self) -> int:
        """this rank's number"""

    @property
    def ranks(self) -> int:
        """R"""

    @property
    def sizes(self) -> Sizes:
        """Sizes: what it has mapped"""

    @property
    def capacity(self) -> int:
        """rows this rank can receive (expert_padded: rows of one expert)"""

    def plan_over(self, storage: Any, tokens: int | None = None) -> Plan:
        """
        A Plan over its storage, uint8 [plan_bytes(config, ranks)]. `tokens`: its N, needed for device memory.
        """

    def metadata(self, count: Any, *, lane: int = 0, stream: Any | None = None) -> Any:
        """
        int32 [3]: sum of all ranks' counts, of those of lower ranks, largest. At a fixed place of the lane.
        `count` is a number, or with the backend 'cuda' an int32 [1] that is read when the call runs.
        """

    def check(self, lane: int = 0) -> None:
        """
        Raises what the lane's calls have found: BadIdError, OverflowError, BadSourceError; on devices also what
        has ended one.
        """

    def synchronize(self, lane: int = 0, stream: Any | None = None) -> None:
        """
        Waits until the stream has done its work and raises what ended a call of the lane on the device.
        """

    def last_dispatch_result(self, lane: int = 0) -> DispatchResult:
        """
        The DispatchResult of the lane's last dispatch, also where it raised OverflowError or BadIdError.
        UsageError where it brought none.
        """

    def load(self) -> ferry._counts.LoadCounts:
        """
        LoadCounts: routes to every expert and rank so far, on every rank alike.
        """

    def wire_counts(self) -> ferry._counts.WireCounts:
        """WireCounts: bytes and messages this rank has written to others."""

    def destroy(self) -> None:
        """
        Gives the buffers back as soon as no array points into them. Later calls raise UsageError.
        """

    def __enter__(self) -> Exchange: ...

    def __exit__(self, *exception: object) -> None: ...

    def __repr__(self) -> str: ...

    def dispatch(self, tokens: Any, ids: Any, weights: Any | None = None, *, format: str | None = None, lane: int = 0, sm_limit: int = 0, memory: ReceiveBuffers | None = None, apply_weights: bool = False, dot_rows: Any | None = None, count: Any | None = None, stream: Any | None = None) -> DispatchResult:
        """
        Sends every token to the ranks of its experts and lays the arrivals out.

        tokens       [N, H] of bfloat16, float16 or float32; rows may lie apart, H elements or more and a multiple of 16 bytes. For
                     raw formats a tuple of up to four arrays [N, ...], which arrive as they are
        ids          int32 or int64 [N, K], C-contiguous, -1 masks a slot; or a Plan: the same routes again, no ids are read
        weights      float32 [N, K], C-contiguous: they travel with the rows
        format       of this call, see Config; default the exchange's
        memory       ReceiveBuffers for what comes out; default the lane's own
        apply_weights   values arrive multiplied by their weight
        dot_rows     rows [rows, H] of combine_type: arrivals.dots[row] = dot(token, row), before weighing
        count        backend 'cuda': int32 [1] in device memory, the N to use when the call runs; tokens' rows are the bound
        sm_limit     backend 'cuda': most blocks at once, 0 for no limit
        stream       backend 'cuda': default the current stream of the arrays' framework

        On the host it blocks until the peers have come, for the exchange's `deadline` at most, without the interpreter's lock.
        UsageError: an argument that does not fit (the peers' call ends with it too, but for a bad `lane` or a misspelt keyword),
        bad ids (BadIdError, after the call).
        OverflowError: rows past the capacity were dropped. Both leave what came in last_dispatch_result().
        """

    def dispatch_send(self, tokens: Any, ids: Any, weights: Any | None = None, *, format: str | None = None, lane: int = 0, sm_limit: int = 0, memory: ReceiveBuffers | None = None, apply_weights: bool = False, dot_rows: Any | None = None, count: Any | None = None, stream: Any | None = None) -> None:
        """
        The send half of dispatch, with its arguments. Waits for no peer; they may be reused after it.
        """

    def dispatch_receive(self, *, lane: int = 0, stream: Any | None = None) -> DispatchResult:
        """
        The receive half of dispatch; may be called from another thread or stream.
        """

    def combine(self, outputs: Any, plan: Plan, *, weights: Any | None = None, topk_weights: Any | None = None, reduction: str | None = None, row_values: Any | None = None, result: Any | None = None, lane: int = 0, sm_limit: int = 0, stream: Any | None = None) -> Any:
        """
        Brings the experts' outputs home and adds them.

        outputs        [rows, H] of bfloat16, float16 or float32, row for row as the arrivals lay; rows may lie apart, H elements
                       or more and a multiple of 16 bytes; None to bring row_values alone home
        plan           of the dispatch whose rows they are
        weights        float32 [rows]: the weights that travelled, arrivals.weight
        topk_weights   float32 [N, K] instead; neither: every weight is 1
        reduction      'partial', 'exact' or 'unreduced'; default the exchange's
        row_values     float32 [rows]: one number a row that comes home
        result         [N, H], unreduced [N, K, H], to write to; default a new array of outputs' type

        Returns the result; with row_values (result, route_values), float32 [N, K], 0 where masked or dropped. Rows past the
        plan's total are never read. On the host it blocks until the peers have come, for the exchange's `deadline` at most,
        without the interpreter's lock. Raises UsageError for arguments that do not fit (the peers' call ends with it too, but for
        a bad `lane` or a misspelt keyword), BadSourceError for a damaged plan.
        """

    def combine_send(self, outputs: Any, plan: Plan, *, weights: Any | None = None, topk_weights: Any | None = None, reduction: str | None = None, row_values: Any | None = None, result: Any | None = None, lane: int = 0, sm_limit: int = 0, stream: Any | None = None) -> None:
        """
        The send half of combine, with its arguments. Outputs may be reused after it; topk_weights with 'partial'
        are refused.
        """

    def combine_receive(self, *, lane: int = 0, stream: Any | None = None) -> Any:
        """The receive half of combine: returns what combine would."""

    def route_values(self, values: Any, plan: Plan, *, lane: int = 0, stream: Any | None = None) -> Any:
        """
        Carries float32 [N, K], one number a route, to its row: returns float32 [rows], 0 on padding.
        """

    def combine_backward(self, d_result: Any, plan: Plan, topk_weights: Any, outputs: Any, *, format: str | None = None, lane: int = 0, sm_limit: int = 0, memory: ReceiveBuffers | None = None, stream: Any | None = None) -> tuple[DispatchResult, Any]:
        """
        Gradients of combine: (arrivals, d_weights).

        d_result [N, H] goes to the rows by the plan, each row times its weight of topk_weights, float32 [N, K]; d_weights,
        float32 [N, K], are the products of d_result with `outputs`, the rows that combine was given, dense, of combine_type.
        """

class Trace:
    """Which experts a router chose, token by token, recorded or synthesised."""

    @property
    def name(self) -> str:
        """what was asked for"""

    @property
    def source(self) -> str:
        """where it comes from, in words"""

    @property
    def layers(self) -> int:
        """layers"""

    @property
    def tokens(self) -> int:
        """of one layer"""

    @property
    def top_k(self) -> int:
        """K"""

    @property
    def experts(self) -> int:
        """E"""

    @property
    def ids(self) -> Any:
        """int32 [layers, tokens, K], a copy; -1 is a masked slot."""

    @property
    def weights(self) -> Any:
        """float32 [layers, tokens, K], a copy."""

    def share(self, layer: int, rank: int, ranks: int, tokens_per_rank: int, step: int = 0) -> tuple[Any, Any]:
        """
        (ids, weights), [tokens_per_rank, K]: the part one rank plays in one call.
        """

    def expert_counts(self, layer: int) -> Any:
        """int64 [E]: routes to each expert in a layer."""

    def save(self, prefix: str) -> None:
        """Writes PREFIX.ids.npy and what goes with it; open_trace reads it back."""

    def __repr__(self) -> str: ...

def open_trace(name: str, directory: str = '', experts: int = 0) -> Trace:
    """
    Opens a trace: 'synth:decode', 'synth:prefill', 'synth:uniform' (also '-grouped', and ':key=value,...'), the
    name of a recorded one in `directory` (default: environment variable FERRY_TRACES), or a path ending in .npy.
    """

class LoadStatistics:
    """
    How unevenly experts are chosen; `max` to `min` are loads divided by the mean load.
    """

    @property
    def routes(self) -> int:
        """sum of all loads"""

    @property
    def max(self) -> float:
        """the largest load"""

    @property
    def p99(self) -> float:
        """99th percentile"""

    @property
    def p90(self) -> float:
        """90th percentile"""

    @property
    def p50(self) -> float:
        """median"""

    @property
    def p10(self) -> float:
        """10th percentile"""

    @property
    def min(self) -> float:
        """the smallest load"""

    @property
    def sigma_ln(self) -> float:
        """standard deviation of ln(load), loads above 0"""

    @property
    def gini(self) -> float:
        """Gini coefficient"""

    @property
    def idle(self) -> int:
        """experts without a route"""

    def __repr__(self) -> str: ...

def load_statistics(counts: Any) -> LoadStatistics:
    """
    LoadStatistics of routes to every expert, int64 [E]. UsageError for none, or a sum of 0.
    """

def rank_counts(counts: Any, placement: Placement) -> Any:
    """int64 [R]: routes to each rank, for counts int64 [E]."""
