# What the exchanges of docs/guides/inference.md stand in: one rank, a thread.
from ferry import Group


def body(rank):
    Group.torch = staticmethod(lambda: rank)
    # BLOCK
    assert decode.config.layout == "expert_padded" and prefill.config.alignment == 128


Group.threads(1).run(body)
