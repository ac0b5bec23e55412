"""Formats of shared libraries: ferry.load_formats()."""

import pathlib
import shutil
import subprocess

import numpy as np
import pytest

import ferry
from oracle import bf16

REPOSITORY = pathlib.Path(__file__).parents[3]
HIDDEN, RANKS = 32, 2

# The upper byte of each bf16 value, and a part that begins with the number of the token's columns.
UPPER_BYTES = r"""
#include "ferry/c/encoder.h"

static ferry_status part_bytes(int32_t hidden, int64_t* bytes, void* user) {
  (void)user;
  bytes[0] = hidden;
  bytes[1] = 16;
  return hidden % 16 == 0 ? FERRY_OK : FERRY_USAGE;
}

static ferry_status on_host(const ferry_encoder_call* call, void* user) {
  for (int64_t row = 0; row < call->rows; ++row) {
    const unsigned char* from = (const unsigned char*)call->tokens + row * call->stride;
    unsigned char* to = (unsigned char*)call->parts[0] + row * call->part_strides[0];
    int32_t* second = (int32_t*)((char*)call->parts[1] + row * call->part_strides[1]);
    for (int c = 0; c < call->hidden; ++c) to[c] = from[2 * c + 1];
    second[0] = call->hidden;
    second[1] = second[2] = second[3] = 0;
  }
  return user == 0 && call->type == FERRY_BF16 ? FERRY_OK : FERRY_USAGE;
}

ferry_status ferry_formats(ferry_register_format_function register_format) {
  ferry_encoder encoder = {0};
  ferry_format format;
  encoder.size = sizeof encoder;
  encoder.part_bytes = part_bytes;
  encoder.on_host = on_host;
  return register_format(NAME, &encoder, &format);
}
"""


@pytest.fixture
def build(tmp_path):
    """Compiles a library of formats in C."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no compiler of C here")

    def compile_library(name, source):
        (tmp_path / f"{name}.c").write_text(source)
        library = tmp_path / f"lib{name}.so"
        subprocess.run([compiler, "-shared", "-fPIC", f'-DNAME="{name}"', "-I", str(REPOSITORY / "include"),
                        str(tmp_path / f"{name}.c"), "-o", str(library)], check=True)
        return library

    return compile_library


def dispatch(rank, **settings):
    """Every token goes to one expert of each rank. The tokens, the received parts and their sources."""
    tokens = np.random.default_rng(rank.index).standard_normal((4, HIDDEN)).astype(bf16)
    with ferry.Exchange(rank, experts=RANKS, top_k=RANKS, hidden=HIDDEN, max_tokens=4, **settings) as exchange:
        rows = exchange.dispatch(tokens, np.tile(np.arange(RANKS), (4, 1)))
        count = int(rows.row_offsets[-1])
        return tokens, [part[:count].copy() for part in rows.parts], rows.source[:count].copy()


def test_tokens_are_encoded_by_the_library(build):
    library = build("upper", UPPER_BYTES)
    assert ferry.load_formats(library) == ["upper"]
    assert ferry.load_formats(str(library)) == ["upper"]  # again: it is known
    ranks = ferry.Group.threads(RANKS).run(lambda rank: dispatch(rank, format="upper"))
    for _, (values, sizes), source in ranks:
        assert len(values) == 4 * RANKS
        for row, (rank, token, _) in enumerate(source):
            upper = ranks[rank][0][token].view(np.uint8)[1::2]
            assert (np.asarray(values[row]).view(np.uint8) == upper).all()
            assert np.asarray(sizes[row]).view(np.int32)[0] == HIDDEN


def test_shared_experts_get_the_encoded_rows(build):
    ferry.load_formats(build("upper_shared", UPPER_BYTES))
    ranks = ferry.Group.threads(RANKS).run(lambda rank: dispatch(rank, format="upper_shared", shared_experts=1))
    for rank, (tokens, (values, _), source) in enumerate(ranks):
        assert len(values) == 4 * (RANKS + 1)
        assert (np.asarray(values[:4]).view(np.uint8) == tokens.view(np.uint8)[:, 1::2]).all()
        assert all(tuple(source[row]) == (rank, row, RANKS) for row in range(4))


def test_what_cannot_be_loaded(build, tmp_path):
    with pytest.raises(ferry.UsageError, match="no_such_library"):
        ferry.load_formats(tmp_path / "no_such_library.so")
    with pytest.raises(ferry.UsageError, match="has no function ferry_formats"):
        ferry.load_formats(build("empty", "int nothing;"))
    with pytest.raises(ferry.UsageError, match="format 'bf16' exists already"):
        ferry.load_formats(build("bf16", UPPER_BYTES))
    with pytest.raises(ferry.UsageError, match=r"ferry_formats\(\) of .*librefuses.so returned 1 \(usage\)"):
        ferry.load_formats(build("refuses", "int ferry_formats(void* f) { (void)f; return 1; }"))
    with pytest.raises(ferry.UsageError, match="path"):
        ferry.load_formats(7)
    with pytest.raises(ferry.UsageError, match="load_formats: the path is empty"):
        ferry.load_formats("")
    with pytest.raises(ferry.UsageError, match="contains a NUL character"):
        ferry.load_formats("libformats.so\0")


def test_a_library_registers_all_of_its_formats_or_none(build):
    both = UPPER_BYTES.replace(
        "return register_format(NAME, &encoder, &format);",
        'ferry_status status = register_format(NAME, &encoder, &format);\n'
        '  return status != FERRY_OK ? status : register_format("upper_taken", &encoder, &format);')
    ferry.load_formats(build("upper_taken", UPPER_BYTES))
    with pytest.raises(ferry.UsageError, match="format 'upper_taken' exists already"):
        ferry.load_formats(build("upper_before_taken", both))
    with pytest.raises(ferry.UsageError, match="'upper_before_taken': unknown"):
        ferry.Config(experts=2, top_k=1, hidden=HIDDEN, max_tokens=4, format="upper_before_taken")


def test_encoders_without_device_code_are_refused_on_a_device(build):
    if not ferry.has_cuda():
        pytest.skip("needs a build with the backend cuda")
    ferry.load_formats(build("upper_host_only", UPPER_BYTES))

    def body(rank):
        with pytest.raises(ferry.UnsupportedError, match="upper_host_only"):
            ferry.Exchange(rank, backend="cuda", experts=2, top_k=1, hidden=HIDDEN, max_tokens=4, format="upper_host_only")

    ferry.Group.threads(1).run(body)
