"""A caller's own format on a GPU: examples/int8_rows.cu, built with nvcc against Ferry's headers alone."""

import pathlib
import shutil
import subprocess

import pytest

torch = pytest.importorskip("torch")

import ferry

REPOSITORY = pathlib.Path(__file__).parents[3]
NVCC = shutil.which("nvcc") or next((path for path in ["/usr/local/cuda/bin/nvcc"] if pathlib.Path(path).exists()), None)
HIDDEN, EXPERTS, TOP_K, TOKENS, RANKS = 256, 4, 2, 50, 2


@pytest.mark.skipif(NVCC is None or not ferry.has_cuda() or not torch.cuda.is_available(), reason="needs a GPU and nvcc")
def test_rows_are_encoded_on_the_gpu(rng, tmp_path):
    library = tmp_path / "libint8_rows.so"
    subprocess.run([NVCC, "-std=c++20", "-arch=native", "-shared", "-Xcompiler", "-fPIC", "-I", str(REPOSITORY / "include"),
                    "-o", str(library), str(REPOSITORY / "examples/int8_rows.cu")], check=True, timeout=60)
    assert ferry.load_formats(library) == ["int8_rows"]
    inputs = [(torch.from_numpy(rng.standard_normal((TOKENS, HIDDEN)).astype("float32")),
               torch.stack([torch.from_numpy(rng.permutation(EXPERTS)[:TOP_K]) for _ in range(TOKENS)])) for _ in range(RANKS)]

    def body(rank):
        device = torch.device("cuda", rank.index % torch.cuda.device_count())
        tokens, ids = (each.to(device) for each in inputs[rank.index])
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            with ferry.Exchange(rank, backend="cuda", experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS,
                                format="int8_rows", shared_experts=1) as exchange:
                rows = exchange.dispatch(tokens, ids)
                exchange.check()
                torch.cuda.synchronize(device)
                total = int(rows.row_offsets[-1])
                return [part[:total].cpu() for part in rows.parts], rows.source[:total].cpu()

    for rank, ((values, scales), source) in enumerate(ferry.Group.threads(RANKS).run(body)):
        assert len(source) > TOKENS  # the shared expert's rows, and routed ones
        sent = torch.stack([inputs[source_rank][0][token] for source_rank, token, _ in source.tolist()])
        scale = (sent.abs().amax(1, keepdim=True) / 127)
        assert torch.equal(scales.view(torch.uint8).view(len(source), 16)[:, :4].contiguous().view(torch.float32), scale)
        assert torch.equal(values.view(torch.int8), torch.round(sent / scale).to(torch.int8))
        assert source[:TOKENS].tolist() == [[rank, token, TOP_K] for token in range(TOKENS)]
