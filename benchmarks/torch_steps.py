"""Training steps of PyTorch and Opacus, in their users' loop; on a GPU if there is one."""

import contextlib
import importlib
import importlib.metadata
import platform

import torch
from torch import nn

from benchmarks.problems import L2_NORM_CLIP, LEARNING_RATE, NOISE_MULTIPLIER, Problem
from benchmarks.settings import StepSettings, Unsupported


class TorchSteps:
    """A network, its optimizer and its batches.

    Args:
      contestant: Name of the contestant.
      problem: The model and its data.
      settings: Settings of the steps.
    """

    def __init__(self, contestant: str, problem: Problem, settings: StepSettings):
        if contestant != "torch_sgd":
            importlib.import_module("opacus")  # whose absence is told before the work begins
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._network = build(problem, private=contestant != "torch_sgd").to(device)
        trained = [p for p in self._network.parameters() if p.requires_grad]
        self.parameters = sum(p.numel() for p in trained)
        self._optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
        self._loss = nn.CrossEntropyLoss()
        if contestant != "torch_sgd":
            self._make_private(contestant == "opacus_ghost", settings.batch)
        x, y = problem.rows(settings.batch * settings.batches)
        x = torch.from_numpy(x)
        if len(problem.input_shape) == 3:
            # Not `contiguous()`, which leaves the strides of one channel as they are: Opacus 1.6
            # takes wrong patches where strides are not the usual ones.
            x = x.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
        x, y = x.to(device), torch.from_numpy(y).to(device)
        self._batches = list(
            zip(x.split(settings.batch), y.split(settings.batch), strict=True),
        )
        self._taken = 0

    def _make_private(self, ghost: bool, batch: int) -> None:
        """Does what `PrivacyEngine.make_private` does, except for the sampling of batches."""
        from opacus import grad_sample, optimizers
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        privacy = {
            "noise_multiplier": NOISE_MULTIPLIER,
            "max_grad_norm": L2_NORM_CLIP,
            "expected_batch_size": batch,
        }
        if ghost:
            self._network = grad_sample.GradSampleModuleFastGradientClipping(
                self._network, max_grad_norm=L2_NORM_CLIP, use_ghost_clipping=True
            )
            self._optimizer = optimizers.DPOptimizerFastGradientClipping(self._optimizer, **privacy)
            self._loss = DPLossFastGradientClipping(self._network, self._optimizer, self._loss)
        else:
            self._network = grad_sample.GradSampleModule(self._network)
            self._optimizer = optimizers.DPOptimizer(self._optimizer, **privacy)

    def run(self, steps: int) -> None:
        """Takes so many steps."""
        for _ in range(steps):
            x, y = self._batches[self._taken % len(self._batches)]
            self._taken += 1
            self._optimizer.zero_grad()
            loss = self._loss(self._network(x), y)
            loss.backward()
            self._optimizer.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @staticmethod
    def versions() -> dict[str, str]:
        """Versions of what runs."""
        versions = {"Python": platform.python_version(), "torch": torch.__version__}
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions["opacus"] = importlib.metadata.version("opacus")
        return versions


def build(problem: Problem, private: bool) -> nn.Module:
    """Returns the network of a problem: logits `[batch, classes]`.

    Images are `[batch, channels, height, width]` here.

    Args:
      problem: The problem.
      private: Whether layers that Opacus cannot take apart are replaced by its own.
    """
    if problem.name == "mnist_cnn":
        return _mnist()
    if problem.name == "cifar_cnn":
        return _cifar()
    if problem.name == "imdb_lstm":
        return Reviews(problem.vocabulary, private)
    if problem.name == "transformer_block":
        return TransformerBlock(problem.vocabulary)
    raise Unsupported(f"{problem.name} is not written in PyTorch")


def _mnist() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def _cifar() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for filters in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.Tanh()]
            channels = filters
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


class Reviews(nn.Module):
    """Logits `[batch, 2]` of token ids `[batch, 80]`, with a bidirectional LSTM.

    PyTorch's LSTM has two biases, which are always added up, where Keras has one; the second is
    held at zero.
    """

    def __init__(self, vocabulary: int, private: bool):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 100)
        self.dense = nn.Linear(100, 32)
        if private:
            from opacus.layers import DPLSTM

            self.lstm = DPLSTM(32, 32, batch_first=True, bidirectional=True)
        else:
            self.lstm = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
        for name, parameter in self.lstm.named_parameters():
            if "bias_hh" in name or "hh.bias" in name:
                nn.init.zeros_(parameter)
                parameter.requires_grad_(False)
        self.hidden = nn.Linear(64, 16)
        self.logits = nn.Linear(16, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of tokens."""
        x = torch.tanh(self.dense(self.embedding(tokens)))
        x, _ = self.lstm(x)
        return self.logits(torch.tanh(self.hidden(x.mean(dim=1))))


class Attention(nn.Module):
    """Self-attention with 4 heads of 16, of inputs `[batch, time, 64]`.

    Written out, because Opacus cannot take `nn.MultiheadAttention` apart, and its own
    `DPMultiheadAttention` (1.6) mixes the heads up with `batch_first=True`, which the others need.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs `[batch, time, 64]`."""

        def heads(values: torch.Tensor) -> torch.Tensor:
            return values.unflatten(-1, (4, 16)).transpose(1, 2)

        mixed = nn.functional.scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        )
        return self.out(mixed.transpose(1, 2).flatten(-2))


class TransformerBlock(nn.Module):
    """Logits `[batch, 2]` of token ids `[batch, 64]`, by one pre-norm block."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.norm_1 = nn.LayerNorm(64, eps=1e-3)  # Keras's default
        self.attention = Attention()
        self.norm_2 = nn.LayerNorm(64, eps=1e-3)
        self.wide = nn.Linear(64, 256)
        self.narrow = nn.Linear(256, 64)
        self.logits = nn.Linear(64, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of tokens."""
        x = self.embedding(tokens)
        x = x + self.attention(self.norm_1(x))
        x = x + self.narrow(torch.relu(self.wide(self.norm_2(x))))
        return self.logits(x.mean(dim=1))
