"""PATE: teachers on disjoint parts of the data label public examples by noisy votes.

1. `random_partition` assigns each example, or each user, to one teacher.
2. Teachers are any models, each trained on its part alone.
3. `GNMax`, or `ConfidentGNMax`, answers public queries by the teachers' noisy votes. Its ledger
   counts the answers: `tfdp.privacy_statement(aggregator, delta=...)`.
4. A student learns from the queries and their answers by plain `fit`. It is post-processing, and
   may be published; teachers and their votes may not.

References:
  - Papernot et al., 2016, Semi-supervised Knowledge Transfer for Deep Learning from Private
    Training Data (https://arxiv.org/abs/1610.05755).
  - Papernot et al., 2018, Scalable Private Learning with PATE (https://arxiv.org/abs/1802.08908).
"""

from tfdp.contrib.pate.aggregation import ConfidentGNMax, GNMax
from tfdp.contrib.pate.data_dependent import nonprivate_data_dependent_epsilon
from tfdp.contrib.pate.partition import Partition, random_partition
from tfdp.contrib.pate.votes import teacher_votes, vote_counts

__all__ = [
    "ConfidentGNMax",
    "GNMax",
    "Partition",
    "nonprivate_data_dependent_epsilon",
    "random_partition",
    "teacher_votes",
    "vote_counts",
]
