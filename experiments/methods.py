"""Training loops by method."""

from experiments.datasets import Data
from experiments.dpagd import DescentTraining
from experiments.report import RunFolder
from experiments.settings import Settings
from experiments.training import Training


def make_training(
    settings: Settings,
    data: Data,
    folder: RunFolder,
    *,
    progress: bool = True,
    every_epoch: bool = True,
) -> Training:
    """Returns the run that `settings` ask for; see `Training`."""
    loop = DescentTraining if settings.method == "dpagd" else Training
    return loop(settings, data, folder, progress=progress, every_epoch=every_epoch)
