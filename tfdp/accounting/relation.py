"""The neighboring relation of every guarantee, and the words that state it.

Two data sets are neighbors under *zero-out* if they have the same number of places N, and differ
in one place, which holds an example (or a user) in one of them, and nothing in the other: whoever
stands there is never drawn. N and whatever is computed from it are constants, the same for both.
(Kairouz et al., 2021, https://arxiv.org/abs/2103.00039, definition 1.1; dp_accounting calls it
REPLACE_SPECIAL.)

Add-or-remove-one is another relation: N differs between neighbors. Sampled Gaussian mechanisms
have the same dominating pair under both if q, the divisor, the noise and the number of steps are
constants, and this is what dp_accounting computes under ADD_OR_REMOVE_ONE. Where they are functions
of N, as in training, their values tell the two data sets of add-or-remove-one apart.
docs/relation.md has the proofs.
"""

from collections.abc import Iterable

from tfdp.accounting.sampling import EXAMPLE, USER

RELATION = "zero-out"

_COMPARED = {
    EXAMPLE: (
        f"Neighboring relation: {RELATION}. Unit of privacy: one training example. The guarantee "
        "compares two data sets that differ in one example, which is there in one of them and "
        "contributes nothing in the other; a person who contributes several examples is protected "
        "less."
    ),
    USER: (
        f"Neighboring relation: {RELATION}. Unit of privacy: one user. The guarantee compares two "
        "data sets that differ in all examples of one user, however many, which are there in one "
        "of them and contribute nothing in the other; it holds for the users that examples were "
        "assigned to."
    ),
}


def stated_relation(unit: str, group_size: int = 1) -> str:
    """Returns the sentences that name the relation and the unit of privacy.

    Args:
      unit: The unit of privacy, "example" or "user".
      group_size: Number of units that are protected together.

    Example:
      >>> stated_relation("example")
      'Neighboring relation: zero-out. Unit of privacy: one training example. ...'
    """
    if group_size == 1:
        return _COMPARED[unit]
    units = {EXAMPLE: "training examples, such as all of one person", USER: "users"}[unit]
    return (
        f"Neighboring relation: {RELATION}. Unit of privacy: a group of up to {group_size} "
        f"{units}. The guarantee compares two data sets that differ in up to {group_size} {unit}s, "
        "which are there in one of them and contribute nothing in the other; whoever contributes "
        "more is protected less."
    )


def stated_constants(unit: str, dataset_sizes: Iterable[int] = ()) -> str:
    """Returns the sentences that say what is public.

    Args:
      unit: The unit of privacy, "example" or "user".
      dataset_sizes: The numbers of examples (users) that are known, N.

    Example:
      >>> print(stated_constants("user", [500]))
      Public, and the same for both data sets: the number of users N (500), ...
    """
    sizes = " and ".join(map(str, dataset_sizes))
    return (
        f"Public, and the same for both data sets: the number of {unit}s N"
        f"{f' ({sizes})' if sizes else ''}, the sampling probability q and the expected batch size "
        "B, the number of steps, the noise multiplier and the clip, or the rules that these "
        "follow. The guarantee does not hide them."
    )
