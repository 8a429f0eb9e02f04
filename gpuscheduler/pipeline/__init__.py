"""From a collection to a plan, once: passes and the plan cache.

fingerprint    What makes two computations alike: words of their tasks and data.
reorder        Reorder steps where devices would wait for each other.
compile        From a graph to a plan: the passes in their order.
template       Plan templates: plans without names and data, reused for alike collections.
cache          The plan cache: collections that were computed before are not planned again.
gpu_libraries  Find out which GPU library a computation names.
"""
