import csv
import dataclasses
import io
import json
import math

import matplotlib.image
import numpy as np
import pytest
import tensorflow as tf
from absl import flags

import tfdp
from experiments import classify, datasets, networks
from experiments.settings import (
    DEFAULTS,
    METHODS,
    RATE_OF,
    SELECTIVE_FLAGS,
    SELECTIVE_METHODS,
    RefusedError,
    resolve,
)
from tests import support
from tests.experiments.classify_support import classify_here, parse, start
from tests.front_ends import needs_keras_3

# Flags.


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        (
            "--dataset=cifar100",
            "should be one of <digits|mnist|fashion_mnist|cifar10|imdb_reviews>",
        ),
        ("--method=rmsprop", "should be one of <dpsgd|"),
        ("--activation=gelu", "should be one of <relu|"),
        ("--features=sift", "should be one of <none|scattering|"),
        ("--head=deep", "should be one of <linear|conv>"),
        ("--eval_split=train", "should be one of <test|validation>"),
        ("--target_epsilon=0", "--target_epsilon must be a positive, finite number"),
        ("--target_epsilon=-1", "--target_epsilon must be a positive"),
        ("--target_epsilon=nan", "--target_epsilon must be a positive"),
        ("--target_epsilon=inf", "--target_epsilon must be a positive"),
        ("--target_epsilon=much", "--target_epsilon"),
        ("--delta=0", "--delta must be a positive, finite number below 1"),
        ("--delta=1", "--delta must be a positive, finite number below 1"),
        ("--l2_norm_clip=0", "--l2_norm_clip must be a positive"),
        ("--l2_norm_clip=inf", "--l2_norm_clip must be a positive"),
        ("--learning_rate=-0.1", "--learning_rate must be a positive"),
        ("--momentum=1", r"--momentum must be in \[0, 1\)"),
        ("--momentum=nan", r"--momentum must be in \[0, 1\)"),
        ("--epochs=0", "--epochs must be an integer of at least 1"),
        ("--epochs=1.5", "--epochs"),
        ("--expected_batch_size=0", "--expected_batch_size must be an integer of at least 1"),
        ("--num_microbatches=0", "--num_microbatches must be an integer of at least 1"),
        ("--chunk_size=-5", "--chunk_size must be an integer of at least 1"),
        ("--validation_examples=0", "--validation_examples must be an integer of at least 1"),
        ("--keras=4", "--keras must be 2 or 3"),
        ("--seed=-1", "--seed must be an integer of at least 0"),
        ("--tempered_scale=0", "--tempered_scale must be a positive"),
        ("--tempered_temperature=nan", "--tempered_temperature must be a positive"),
        ("--weight_decay=-0.1", "--weight_decay must be a positive, finite number"),
        ("--tempered_offset=inf", "--tempered_offset must be a finite number"),
        ("--epsilon=3", "Unknown command line flag 'epsilon'"),
    ],
)
def test_bad_flag_is_refused_with_a_sentence(argument, complaint):
    with pytest.raises(flags.Error, match=complaint.replace("|", r"\|")):
        parse(argument)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--num_microbatches=8", "--chunk_size=64"], "--num_microbatches and --chunk_size"),
        (["--insecure_fixed_noise"], "--insecure_fixed_noise must come with --seed"),
        (["--head=conv"], "--head must come with --features=scattering: .*--head=conv"),
        (
            ["--features=scattering", "--dataset=imdb_reviews"],
            "--features=scattering must come with images: .*--dataset=imdb_reviews",
        ),
        (["--expected_batch_size=1439"], "at most 1438, the number of training examples"),
        (
            ["--features=scattering", "--augmentations=2"],
            "--features must be one of none with --augmentations, .*--features=scattering",
        ),
        (
            ["--method=dpsur_sgd", "--augmentations=2"],
            "--method must be one of dpsgd, .* with --augmentations.*--method=dpsur_sgd",
        ),
        (
            ["--num_microbatches=8", "--augmentations=2"],
            "--num_microbatches must be left out with --augmentations",
        ),
        (
            ["--dataset=imdb_reviews", "--augmentations=2"],
            "--dataset must be one of digits, .*--dataset=imdb_reviews",
        ),
        (
            ["--method=dpagd", "--weight_decay=0.1"],
            "--method must be one of dpsgd, .* with --weight_decay. Received: --method=dpagd",
        ),
        (
            ["--architecture=residual", "--keras=3"],
            "--keras must be one of 2 with --architecture=residual. Received: --keras=3",
        ),
        (
            ["--architecture=residual", "--dataset=imdb_reviews"],
            "--dataset must be one of digits, .*--dataset=imdb_reviews",
        ),
        (
            ["--architecture=residual", "--features=scattering"],
            "--features must be one of none with --architecture=residual",
        ),
        (["--delta=0.001"], "--delta must be below 1/N = 0.0007"),
        (["--delta=1e-90", "--target_epsilon=0.1"], "--target_epsilon=0.1 .*cannot be reached"),
        (["--eval_split=validation", "--validation_examples=1438"], "--validation_examples"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tmp_path, arguments, complaint):
    folder = tmp_path / "run"
    with pytest.raises((RefusedError, datasets.DataError), match=complaint):
        classify_here(f"--output_dir={folder}", *arguments)
    assert not folder.exists()


def test_an_argument_that_is_no_flag_is_refused():
    with pytest.raises(SystemExit, match=r"classify: .*Received: digits"):
        classify.main(["classify", "digits"])


@pytest.mark.slow
def test_refusal_ends_the_program_without_a_traceback(tmp_path):
    process = start(f"--output_dir={tmp_path / 'run'}", "--expected_batch_size=5000")
    _, errors = process.communicate()
    assert process.returncode not in (0, None)
    assert "--expected_batch_size=5000" in errors and "Traceback" not in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dataset", datasets.DATASETS)
@pytest.mark.parametrize("method", METHODS)
def test_every_data_set_has_defaults_for_every_method(dataset, method):
    settings = resolve({"dataset": dataset, "method": method})
    below = RATE_OF.get(method, method.replace("dpsur_", "dp"))
    assert settings.learning_rate == DEFAULTS[dataset].learning_rate[below]
    absent = {"num_microbatches", "chunk_size", "seed", "validation_examples", "max_attempts"}
    absent |= {"head", "keras", "augmentations", "weight_decay", "architecture", "mixed_bfloat16"}
    absent |= set() if method in SELECTIVE_METHODS else set(SELECTIVE_FLAGS)
    for field in dataclasses.fields(settings):
        assert getattr(settings, field.name) is not None or field.name in absent
    # What the defaults say is acceptable as flags, too.
    flag = [f"--{f.name}={getattr(settings, f.name)}" for f in dataclasses.fields(settings)]
    assert classify.settings_from(parse(*(f for f in flag if not f.endswith("=None")))) == settings


def test_defaults_are_those_of_the_command_line():
    assert classify.settings_from(parse()) == resolve({})


def test_where_runs_go_by_default():
    assert classify.default_output_dir(resolve({})) == "results/classify/digits_dpsgd_eps3"
    settings = resolve({"method": "sgd", "eval_split": "validation", "seed": 4})
    assert classify.default_output_dir(settings) == "results/classify/digits_sgd_validation_seed4"
    settings = resolve({"features": "scattering"})
    expected = "results/classify/digits_dpsgd_scattering_linear_eps3"
    assert classify.default_output_dir(settings) == expected


# Runs.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    return folder, classify_here(f"--output_dir={folder}", "--epochs=2", "--seed=3")


@pytest.mark.slow
def test_a_run_leaves_its_artefacts(finished):
    folder, result = finished
    names = ["curve.png", "flags.txt", "metrics.csv", "model.keras", "privacy.txt", "result.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    image = matplotlib.image.imread(io.BytesIO((folder / "curve.png").read_bytes()), "png")
    assert image.ndim == 3
    assert result["steps"] == 2 * round(1438 / result["settings"]["expected_batch_size"])
    assert result["evaluated_on"] == "test" and result["evaluation_examples"] == 359


def test_metrics_agree_with_the_result(finished):
    folder, result = finished
    rows = list(csv.DictReader(io.StringIO((folder / "metrics.csv").read_text())))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    for name, key in (("epsilon", "epsilon"), ("accuracy", "accuracy"), ("step", "steps")):
        assert float(rows[-1][name]) == result[key]
    assert 0 < float(rows[0]["epsilon"]) < float(rows[1]["epsilon"])
    assert 0 < float(rows[0]["seconds"]) < float(rows[1]["seconds"])


def test_epsilon_is_that_of_the_steps_taken_and_within_the_target(finished):
    _, result = finished
    ledger = tfdp.accounting.PrivacyLedger.from_dict(result["ledger"])
    assert ledger.steps == result["steps"]
    bound = ledger.epsilon(result["delta"])
    assert bound.epsilon == result["epsilon"] <= result["settings"]["target_epsilon"]
    assert result["epsilon"] > 0.99 * result["settings"]["target_epsilon"]
    assert dict(bound.by_accountant) == result["epsilon_by_accountant"]
    (release,) = ledger.releases
    batch = result["settings"]["expected_batch_size"]
    assert release.event.sampling_probability == batch / 1438
    assert release.event.event.noise_multiplier == result["noise_multiplier"]


def test_privacy_statement_says_what_the_guarantee_is_and_is_not(finished):
    folder, result = finished
    text = " ".join((folder / "privacy.txt").read_text().split())
    assert support.stated_epsilon(text) == pytest.approx(result["epsilon"], rel=1e-5)
    assert "1e-05" in text
    assert "Neighboring relation: zero-out. Unit of privacy: one training example." in text
    assert "examples of the test split" in text and "not among those that are protected" in text
    assert "Who was sampled was decided by --seed" in text and "--seed=3" not in text
    assert "for tests only" not in text


def test_saved_model_is_the_one_that_was_evaluated(finished):
    folder, result = finished
    model = tf.keras.models.load_model(folder / "model.keras")
    data = datasets.load("digits")
    logits = model(data.eval_x).numpy()
    accuracy = np.mean(np.argmax(logits, axis=1) == data.eval_y)
    assert accuracy == pytest.approx(result["accuracy"], abs=1e-6)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = -log_p[np.arange(len(log_p)), data.eval_y].mean()
    assert loss == pytest.approx(result["loss"], rel=1e-4)
    assert model.optimizer.ledger.to_dict() == result["ledger"]


def test_flagfile_stands_for_the_run(finished):
    folder, result = finished
    settings = classify.settings_from(parse(f"--flagfile={folder / 'flags.txt'}"))
    assert dataclasses.asdict(settings) == result["settings"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--method=dpsur_sgd"],
        ["--method=dpagd"],
        ["--method=sgd"],
        pytest.param(["--keras=3"], marks=needs_keras_3),
    ],
)
def test_in_bfloat16(tmp_path, arguments):
    arguments = [*arguments, "--epochs=4", "--seed=3", f"--output_dir={tmp_path}"]
    result = classify_here(*arguments, "--mixed_bfloat16")
    assert result["accuracy"] > 0.3
    assert result["epsilon"] is None or result["epsilon"] <= result["settings"]["target_epsilon"]
    settings = classify.settings_from(parse(f"--flagfile={tmp_path / 'flags.txt'}"))
    assert settings.mixed_bfloat16 and dataclasses.asdict(settings) == result["settings"]
    with pytest.raises(RefusedError, match="mixed_bfloat16"):  # It is another run.
        classify_here(*arguments, "--nomixed_bfloat16")


def weighted(by_class, labels):
    """Accuracy from that of the classes."""
    return sum(accuracy * np.mean(labels == int(c)) for c, accuracy in by_class.items())


def test_accuracies_of_the_classes_make_up_the_accuracy(finished):
    _, result = finished
    labels = datasets.load("digits").eval_y
    by_class = result["accuracy_by_class"]
    assert list(by_class) == [str(c) for c in range(10)]
    assert weighted(by_class, labels) == pytest.approx(result["accuracy"], abs=1e-6)
    # Mutants: the classes of another split, or in another order.
    others = datasets.load("digits").train_y
    assert weighted(by_class, others) != pytest.approx(result["accuracy"], abs=1e-6)
    shuffled = dict(zip(by_class, reversed(by_class.values()), strict=True))
    assert weighted(shuffled, labels) != pytest.approx(result["accuracy"], abs=1e-6)


def test_the_worst_and_the_best_class_are_named():
    text = classify.by_class({"0": 0.9, "1": 0.25, "2": 0.5, "3": 0.975})
    assert text == (
        "Of class 1, 25.00% are correct (the worst), of class 3, 97.50% (the best): a gap of "
        "72.50 points."
    )


def test_a_finished_run_is_reported_and_not_repeated(finished, capsys, monkeypatch):
    folder, result = finished
    monkeypatch.setattr(datasets, "load", None)  # It needs no data, either.
    again = classify_here(f"--output_dir={folder}", f"--flagfile={folder / 'flags.txt'}")
    assert again == result
    output = capsys.readouterr().out
    assert "is finished" in output and f"{result['accuracy']:.2%}" in output
    assert classify.by_class(result["accuracy_by_class"]) in output.splitlines()
    assert "--seed: epsilon holds only towards those who do not know it" in output


def test_a_finished_run_is_not_passed_off_as_another(finished):
    folder, _ = finished
    with pytest.raises(RefusedError, match=r"--target_epsilon=1\.0"):
        classify_here(f"--output_dir={folder}", "--epochs=2", "--seed=3", "--target_epsilon=1")


@pytest.mark.slow
def test_run_without_privacy_says_so(tmp_path, capsys):
    result = classify_here(f"--output_dir={tmp_path}", "--method=sgd", "--epochs=3")
    assert result["epsilon"] is None and "ledger" not in result
    assert result["accuracy"] > 0.5
    assert "No differential privacy" in (tmp_path / "privacy.txt").read_text()
    rows = list(csv.DictReader(io.StringIO((tmp_path / "metrics.csv").read_text())))
    assert math.isinf(float(rows[-1]["epsilon"])) and int(rows[-1]["step"]) == result["steps"]
    assert "No differential privacy" in capsys.readouterr().out
    # With --overwrite it is done again, as another run.
    second = classify_here(f"--output_dir={tmp_path}", "--method=sgd", "--epochs=1", "--overwrite")
    assert second["steps"] == result["steps"] // 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpsgd", "sgd"])
def test_a_run_that_diverged_is_a_result(tmp_path, monkeypatch, method):
    # Fixed, as what such a model guesses right is chance; the setting would last for this process.
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)
    fixed = ("--seed=7", "--insecure_fixed_noise")
    folder = f"--output_dir={tmp_path}"
    flags = (f"--method={method}", "--epochs=3", "--learning_rate=1e38")
    result = classify_here(*flags, *fixed, folder)
    assert result["loss"] is None and result["accuracy"] < 0.3
    assert json.loads((tmp_path / "result.json").read_text())["loss"] is None
    assert "nan" in (tmp_path / "metrics.csv").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("head", ["conv", "linear"])
def test_it_trains_on_features(tmp_path, head):
    result = classify_here(
        f"--output_dir={tmp_path / 'run'}",
        *("--features=scattering", f"--features_dir={tmp_path / 'features'}"),
        *(f"--head={head}", "--epochs=2", "--method=adam", "--expected_batch_size=64"),
    )
    assert result["settings"]["features"] == "scattering" and result["settings"]["head"] == head
    assert result["parameters"] == {"linear": 3_250, "conv": 12_330}[head]
    assert result["accuracy"] > 0.5
    # The model that was saved sees features, not images.
    data = datasets.load("digits", features="scattering")
    model = tf.keras.models.load_model(tmp_path / "run" / "model.keras")
    right = np.argmax(model(data.eval_x), axis=1) == data.eval_y
    assert np.mean(right) == pytest.approx(result["accuracy"], abs=1e-6)
    for c, accuracy in result["accuracy_by_class"].items():
        assert np.mean(right[data.eval_y == int(c)]) == accuracy


@pytest.mark.slow
def test_a_run_on_features_has_its_ledger(tmp_path):
    result = classify_here(
        f"--output_dir={tmp_path / 'run'}",
        *("--features=scattering", "--features_dir=", "--epochs=1"),
    )
    assert result["settings"]["head"] == networks.HEADS[0]
    assert 0 < result["epsilon"] <= result["settings"]["target_epsilon"]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "below"), [("dpis", "dpsgd"), ("dpis_adam", "dpadam")])
def test_importance_sampling_has_the_ledger_of_the_method_below(tmp_path, method, below):
    if method not in METHODS:
        pytest.skip(f"no {method}")
    results = [
        classify_here(f"--output_dir={tmp_path / name}", f"--method={name}", "--epochs=1")
        for name in (method, below)
    ]
    assert results[0]["ledger"] == results[1]["ledger"]
    assert results[0]["epsilon"] == results[1]["epsilon"]
    optimizers = [
        tf.keras.models.load_model(tmp_path / name / "model.keras").optimizer
        for name in (method, below)
    ]
    assert type(optimizers[0]) is type(optimizers[1])
    assert (
        optimizers[0].get_config()["clipping_rule"] != optimizers[1].get_config()["clipping_rule"]
    )


def test_the_help_has_the_defaults():
    text = classify._default("expected_batch_size")
    both = "2048 (mnist, fashion_mnist, cifar10)"
    assert text == f"Default: 256 (digits); {both}; 1024 (imdb_reviews)."
    assert classify._default("delta") == "Default: 1e-05."


def test_an_interrupted_run_says_how_to_resume(monkeypatch, capsys):
    def interrupted(values):
        raise KeyboardInterrupt

    monkeypatch.setattr(classify, "run", interrupted)
    with pytest.raises(SystemExit) as ended:
        classify.main(["classify"])
    assert ended.value.code == 130
    assert "run the same command again to resume" in capsys.readouterr().err


@pytest.mark.slow
def test_flags_of_a_run_hold_its_folders(finished):
    folder, _ = finished
    flags = (folder / "flags.txt").read_text()
    assert f"--output_dir={folder}" in flags and "--features_dir=" in flags
