import json

import keras
import pytest

from benchmarks import gpu
from tests.front_ends import needs_keras_3

PLAIN = gpu.Part("mnist_cnn", private=False, batch=8)
PRIVATE = gpu.Part("mnist_cnn", batch=8)


@pytest.fixture
def float32():
    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)


@pytest.mark.parametrize("small", [False, True])
def test_each_part_comes_once_and_beside_plain_keras(small):
    parts = gpu.parts(small)
    assert len(set(parts)) == len(parts) > 30
    trained = [part for part in parts if part.network.split()[0] not in ("profile", "peers")]
    for part in trained:
        if part.network != "noise":
            twin = gpu.dataclasses.replace(part, private=not part.private)
            assert abs(parts.index(part) - parts.index(twin)) == 1


def test_goes_on_where_it_stopped_and_tries_errors_again(tmp_path, monkeypatch, capsys):
    path = tmp_path / "lines" / "gpu.jsonl"
    asked, fails = [], {PRIVATE}

    def run(part, small, peer_python, seconds):
        asked.append(part)
        return {"error": "lost"} if part in fails else {"examples_a_second": 10.0}

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu, "parts", lambda small: [PLAIN, PRIVATE])
    gpu.run_all(path, minutes=1, small=True, peer_python="")
    assert asked == [PLAIN, PRIVATE] and "lost" in capsys.readouterr().out
    fails.clear()
    gpu.run_all(path, minutes=1, small=True, peer_python="")
    assert asked == [PLAIN, PRIVATE, PRIVATE]
    assert [line.get("error") for line in gpu.read(path)] == [None, "lost", None]
    gpu.run_all(path, minutes=0.1, small=True, peer_python="")
    assert len(asked) == 3


def test_begins_nothing_when_no_time_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "run", lambda *_: pytest.fail("A part began."))
    gpu.run_all(tmp_path / "gpu.jsonl", minutes=0.1, small=True, peer_python="")
    assert "No time is left" in capsys.readouterr().out


def test_page_has_the_ratio_of_examples_a_second():
    measured = {"first_seconds": 2.0, "peak_mib": 100.0, "machine": "a GPU"}
    lines = [
        {"part": vars(PLAIN), **measured, "examples_a_second": 300.0},
        {"part": vars(PRIVATE), **measured, "examples_a_second": 200.0},
        {"part": vars(gpu.Part("noise")), "noise, ms": 1.0},
    ]
    page = gpu.render(lines)
    assert page.startswith("a GPU\n")
    expected = (
        "| `mnist_cnn` | 8 | no | float32 | 300 | 200 | **1.50** | 2.0 / 2.0 | 100.0 / 100.0 |"
    )
    assert expected in page and '"noise, ms": 1.0' in page


def test_an_error_is_a_result():
    assert "'nothing'" in gpu.run(gpu.Part("nothing"), True, "")["error"]


@needs_keras_3
@pytest.mark.slow
def test_trains_in_chunks(float32):
    from benchmarks import gpu_networks

    training = gpu_networks.Training("wide_resnet", True, 8, 2, False, True, True)
    found = training.time(turns=1, turn_seconds=0.01)
    assert training._calls > 1 and len(found["step_ms"]) == 1
    assert found["examples_a_second"] == pytest.approx(8e3 / found["step_ms"][0], rel=0.01)
    json.dumps(found)


def test_longest_operations_come_first_and_the_gpu_alone():
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    from benchmarks import gpu_networks

    space = xplane_pb2.XSpace()
    for name in ("/host:CPU", "/device:GPU:0"):
        plane = space.planes.add(name=name)
        for number, kernel in enumerate(("short", "long"), 1):
            plane.event_metadata[number].name = f"{name[1]} {kernel}"
            plane.lines.add().events.add(metadata_id=number, duration_ps=number * 10**9)
    found = gpu_networks.longest(space.SerializeToString(), steps=2)
    assert list(found.items()) == [("d long", 1.0), ("d short", 0.5)]
