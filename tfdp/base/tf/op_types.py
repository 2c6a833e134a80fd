"""Types of TensorFlow's operations that call functions: the words for control flow in graphs."""

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
BRANCHES = frozenset({"If", "StatelessIf"})
CASES = frozenset({"Case", "StatelessCase"})  # Branches by a number.
LOOPS = frozenset({"StatelessWhile", "While"})
CONTROL_FLOW = CALLS | BRANCHES | CASES | LOOPS
STATEFUL = frozenset({"Case", "If", "StatefulPartitionedCall", "While"})
