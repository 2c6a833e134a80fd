import dataclasses
import io
import json

import matplotlib.image
import pytest

from experiments.report import Row, RunFolder, draw_curve
from experiments.settings import RefusedError, resolve

ROWS = [Row(1, 6, 0.5, 0.3, 2.0, 1.25), Row(2, 12, 0.75, 0.6, 1.0, 2.5)]


def labels(figure):
    return [axes.get_ylabel() for axes in figure.axes]


def test_rows_are_written_as_they_are(tmp_path):
    RunFolder(tmp_path / "new" / "run").write_rows(ROWS)
    assert (tmp_path / "new" / "run" / "metrics.csv").read_text() == (
        "epoch,step,epsilon,accuracy,loss,seconds\n1,6,0.5,0.3,2.0,1.25\n2,12,0.75,0.6,1.0,2.5\n"
    )


def test_curve_shows_accuracy_and_epsilon(tmp_path):
    settings = resolve({"target_epsilon": 0.8})
    figure = draw_curve(ROWS, settings)
    assert labels(figure) == ["test accuracy (%)", "privacy spent: ε"]
    assert figure.axes[1].get_xlabel() == "steps"
    assert figure.get_suptitle() == "digits, dpsgd: 60.0% at ε = 0.75, δ = 1e-05"
    assert list(figure.axes[0].lines[0].get_ydata()) == [30, 60]
    assert list(figure.axes[1].lines[0].get_ydata()) == [0.5, 0.75]
    RunFolder(tmp_path).write_curve(ROWS, settings)
    image = matplotlib.image.imread(io.BytesIO((tmp_path / "curve.png").read_bytes()), "png")
    assert image.shape[0] > 400 and image.shape[1] > 600 and image.std() > 0.01


def test_curve_of_a_method_without_privacy_has_one_panel():
    rows = [dataclasses.replace(row, epsilon=float("inf")) for row in ROWS]
    figure = draw_curve(rows, resolve({"method": "adam"}))
    assert labels(figure) == ["test accuracy (%)"]
    assert figure.get_suptitle() == "digits, adam: 60.0%"


def test_result_says_that_a_run_is_finished(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.result() is None
    folder.write_result({"accuracy": 0.5, "epsilon": None})
    assert folder.result() == json.loads((tmp_path / "result.json").read_text())
    assert folder.result() == {"accuracy": 0.5, "epsilon": None}


@pytest.mark.parametrize(
    ("began", "goes_on", "complaint"),
    [
        ({}, {"target_epsilon": 4.0}, r"--target_epsilon=3.0 .*--target_epsilon=4.0"),
        ({}, {"delta": 1e-6}, r"--delta=1e-05 .*--delta=1e-06"),
        ({}, {"l2_norm_clip": 0.123}, r"--l2_norm_clip=.*--l2_norm_clip=0.123"),
        ({}, {"expected_batch_size": 100}, "--expected_batch_size=100"),
        ({}, {"epochs": 999}, "--epochs=999"),
        ({}, {"num_microbatches": 8}, "no --num_microbatches .*--num_microbatches=8"),
        ({"num_microbatches": 8}, {}, "--num_microbatches=8 .*no --num_microbatches"),
        ({}, {"seed": 1}, "no --seed .*--seed=1"),
        ({"seed": 1}, {"seed": 1, "insecure_fixed_noise": True}, "--insecure_fixed_noise=True"),
        ({}, {"learning_rate": 0.123}, "--learning_rate=0.123"),
        ({}, {"features": "scattering"}, "--features=none .*--features=scattering"),
        (
            {"features": "scattering"},
            {"features": "scattering", "head": "conv"},
            "--head=linear .*--head=conv",
        ),
        ({}, {"method": "dpsignsgd"}, "--method=dpsgd .*--method=dpsignsgd"),
        ({}, {"eval_split": "validation"}, "--eval_split=validation"),
    ],
)
def test_a_run_resumes_with_the_settings_it_began_with_only(tmp_path, began, goes_on, complaint):
    folder = RunFolder(tmp_path)
    folder.begin(resolve(began))
    folder.begin(resolve(began))
    with pytest.raises(RefusedError, match=complaint):
        folder.begin(resolve(goes_on))


def test_clearing_removes_nothing_but_the_run(tmp_path):
    folder = RunFolder(tmp_path)
    folder.begin(resolve({}))
    folder.write_rows(ROWS)
    folder.checkpoint.mkdir()
    (folder.checkpoint / "ckpt-1.index").touch()
    (tmp_path / "notes.md").touch()
    folder.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]


def test_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="--output_dir"):
        RunFolder(tmp_path / "file" / "run").begin(resolve({}))
