# What the CUDA graph of docs/guides/inference.md stands in. A stand-in for PyTorch captures nothing. The token count is refused
# by name, since only the backend cuda takes it, and then left out.
import contextlib
import types

import ml_dtypes
import numpy as np

import ferry

TOKENS, TOP_K, HIDDEN = 4, 2, 128
torch = types.SimpleNamespace(cuda=types.SimpleNamespace(CUDAGraph=object, graph=lambda graph: contextlib.nullcontext()))


class Decode:
    def __init__(self, exchange):
        self.exchange, self.combine = exchange, exchange.combine

    def dispatch(self, *arguments, **named):
        try:
            self.exchange.dispatch(*arguments, **named)
            raise AssertionError("a host backend took a count in device memory")
        except ferry.UnsupportedError as refused:
            assert "count" in str(refused), refused
        del named["count"]
        return self.exchange.dispatch(*arguments, **named)


def masked_grouped_gemm(rows, scales, counts):
    assert len(rows) == len(counts) == 4 and scales is not None
    return np.ones(rows.shape, ml_dtypes.bfloat16)


def body(rank):
    decode = Decode(ferry.Exchange(rank, experts=4, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, layout="expert_padded",
                                   format="fp8-columns"))
    x = np.ones((TOKENS, HIDDEN), ml_dtypes.bfloat16)
    ids = np.arange(TOKENS * TOP_K).reshape(TOKENS, TOP_K) % 4
    weights, count = np.full((TOKENS, TOP_K), 0.5, np.float32), np.array([TOKENS], np.int32)
    # BLOCK
    assert (y == 1).all()


ferry.Group.threads(1).run(body)
