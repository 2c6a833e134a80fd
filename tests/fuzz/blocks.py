"""Building blocks of random models, each of which writes lines of Python.

A recipe is plain data: a block is `{"op": name, "k": [three integers]}`, and takes what it needs to
know of the integers by remainders, so that it stays valid when the blocks around it are removed.
"""

import dataclasses
from collections.abc import Callable

N = "N"  # A dimension that is the number of rows.
BLOCKS: dict[str, "Block"] = {}


class CannotUse(Exception):
    """A block does not fit where it stands."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A building block: what it writes, and in which families of cases it is used."""

    name: str
    write: Callable
    families: tuple[str, ...]


def block(name, *families):
    """Registers a function `(code, k)` that writes a block; of `net` if nothing else is said."""

    def register(write):
        BLOCKS[name] = Block(name, write, families or ("net",))
        return write

    return register


def names(*families):
    return [b.name for b in BLOCKS.values() if set(b.families) & set(families)]


class Code:
    """The model being written: `h<count>` holds values of shape `shape`.

    Attributes:
      init: Lines that make layers, variables and state, run once for each model.
      lines: Lines of the loss.
      shape: Shape of the current values, `N` where the number of rows is.
      variables: Expressions of lists of trainable variables.
      saved: Expressions of lists of variables which must not depend on data.
      traits: "random", "state", "unstable" (values that a loop over examples need not have).
    """

    def __init__(self, shape, dtype, ids=0):
        self.init, self.lines = [], []
        self.shape, self.dtype, self.ids = list(shape), dtype, ids
        self.variables, self.saved = [], []
        self.traits = set()
        self.trainable = False
        self.weights = []  # (name, shape), for blocks that share.
        self.kept = {}  # shape -> earlier values
        self.count = 0

    @property
    def h(self):
        return f"h{self.count}"

    @property
    def rank(self):
        return len(self.shape)

    @property
    def row_axis(self):
        return self.shape.index(N)

    def need(self, holds):
        if not holds:
            raise CannotUse

    def fresh(self, prefix):
        return f"{prefix}{len(self.init)}_{len(self.lines)}"

    def put(self, expression, shape=None):
        """Makes `expression`, in which `h` stands for the current values, the current ones."""
        shape = self.shape if shape is None else shape
        self.need(shape.count(N) == 1 and len(shape) <= 5)
        size = 1
        for d in shape:
            self.need(d == N or d >= 1)
            size *= 1 if d == N else d
        self.need(size <= 4000)
        self.kept[tuple(self.shape)] = self.h
        old = self.h
        self.count += 1
        self.lines.append(f"{self.h} = {expression.format(h=old)}")
        self.shape = list(shape)

    def layer(self, code, shape, call="{layer}({{h}})", trainable=True):
        self.trainable |= trainable
        name = self.fresh("layer")
        separator = "" if code.endswith("(") else ", "
        self.init.append(f"{name} = tf.keras.layers.{code}{separator}dtype='{self.dtype}')")
        self.variables.append(f"{name}.trainable_variables")
        self.saved.append(f"[v for v in {name}.non_trainable_variables if 'float' in str(v.dtype)]")
        self.put(call.format(layer=name), shape)

    def weight(self, shape, share=False):
        """The name of a trainable variable; with `share` an earlier one, if one fits."""
        shape, self.trainable = list(shape), True
        if share:
            for name, other in self.weights:
                if other == shape:
                    return name
        name = self.fresh("w")
        self.init.append(
            f"{name} = tf.Variable(tf.zeros({shape}, '{self.dtype}'), name='{name}/w')"
        )
        self.variables.append(f"[{name}]")
        self.weights.append((name, shape))
        return name

    def state(self, code, saved=False):
        """The name of something that is made once."""
        name = self.fresh("s")
        self.init.append(f"{name} = {code}")
        if saved:
            self.saved.append(f"[{name}]")
        return name

    def line(self, code):
        self.lines.append(code.format(h=self.h))

    def axis(self, k, rows=False):
        """An axis by remainder; not that of the rows unless `rows`."""
        axes = [i for i in range(self.rank) if rows or self.shape[i] != N]
        self.need(axes)
        return axes[k % len(axes)]

    def shape_code(self, shape=None):
        return f"[{', '.join('-1' if d == N else str(d) for d in shape or self.shape)}]"

    def apply(self, recipe):
        BLOCKS[recipe["op"]].write(self, recipe["k"])
