import pytest

from experiments.dpagd import DescentTraining
from experiments.settings import DEFAULTS, RefusedError, resolve
from tests.experiments.classify_support import classify_here


def run(folder, *arguments):
    return classify_here("--method=dpagd", "--seed=1", f"--output_dir={folder}", *arguments)


def test_epsilon_is_the_budget_and_not_what_was_spent(tmp_path):
    result = run(tmp_path, "--epochs=3")
    assert result["accuracy"] > 0.7
    assert result["epsilon"] == 3.0 and result["epsilon_by_accountant"] == {"RDP filter": 3.0}
    assert 0 < result["steps"] <= 3 * 6
    released = result["ledger"]["releases"]
    assert sum(each["count"] for each in released) >= result["steps"]
    text = (tmp_path / "privacy.txt").read_text()
    assert "(3, 1e-05)-differential privacy" in text and "1438 training examples" in text


@pytest.mark.slow
def test_an_interrupted_run_resumes_with_what_was_spent(tmp_path, monkeypatch):
    end_epoch, train = DescentTraining.end_epoch, DescentTraining._train
    spent = []

    def killed(self, *arguments):
        row = end_epoch(self, *arguments)
        if len(self.rows) == 2:
            spent.append(self.descent.budget.to_dict())
            raise KeyboardInterrupt
        return row

    def resumed(self, bar):
        assert len(self.rows) == 2 and not self.descent.finished
        spent.append(self.descent.budget.to_dict())
        train(self, bar)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DescentTraining, "end_epoch", killed)
        run(tmp_path, "--epochs=4")
    monkeypatch.setattr(DescentTraining, "_train", resumed)
    result = run(tmp_path, "--epochs=4")
    assert spent[0] == spent[1] and spent[0]["releases"]
    assert result["steps"] > 2 * 6 - 1 and result["epsilon"] == 3.0


@pytest.mark.parametrize("argument", ["--chunk_size=64", "--num_microbatches=2"])
def test_what_it_does_not_have_is_refused(tmp_path, argument):
    with pytest.raises(RefusedError, match=r"must be left out with --method=dpagd"):
        run(tmp_path / "run", argument)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_schedule_is_that_of_the_longest_step(tmp_path, monkeypatch):
    longest = []
    end_epoch = DescentTraining.end_epoch

    def noted(self, *arguments):
        longest.append((self.descent.iterations, self.descent.largest_step_size))
        return end_epoch(self, *arguments)

    monkeypatch.setattr(DescentTraining, "end_epoch", noted)
    run(tmp_path, "--epochs=3", "--momentum=0.9", "--learning_rate_schedule=linear")
    assert len(longest) > 1 and longest[-1][1] < longest[0][1]
    assert all(size <= 2.0 * (1 - made / 18) + 1e-6 for made, size in longest)


@pytest.mark.parametrize("dataset", DEFAULTS)
def test_defaults_of_other_methods_are_not_its_own(dataset):
    settings = resolve({"dataset": dataset, "method": "dpagd"})
    assert settings.learning_rate_schedule == "constant"
    assert settings.chunk_size is None
    assert resolve({"dataset": "imdb_reviews", "method": "dpadam"}).chunk_size


def test_a_budget_that_is_too_small_is_refused(tmp_path):
    with pytest.raises(RefusedError, match=r"--target_epsilon=0.0001 .*cannot be reached"):
        run(tmp_path / "run", "--target_epsilon=0.0001")
