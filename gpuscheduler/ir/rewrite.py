"""Rewrites of expressions: other views, other input numbers."""

from __future__ import annotations

from collections.abc import Callable

from .expr import Expr, Kernel, replace_leaves


def change_leaves(kernel: Kernel, change: Callable[[Expr], Expr]) -> Kernel:
    """The kernel with each leaf `x` replaced by `change(x)`."""
    return kernel.with_roots(replace_leaves(kernel.roots, change))


def renumber_arrays(kernel: Kernel, number: Callable[[int], int]) -> Kernel:
    """The kernel with other numbers for its arrays."""
    return change_leaves(kernel, lambda leaf: renumber_leaf(leaf, number))


def renumber_leaf(leaf: Expr, number: Callable[[int], int]) -> Expr:
    if leaf.op != "input":
        return leaf
    n, view = leaf.data
    return Expr("input", (), leaf.dtype, (number(n), view))
