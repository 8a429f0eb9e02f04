"""Expressions of many operations are values like others."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np

from gpuscheduler.ir.expr import DEEP, LONG, Expr, Kernel, Reduction, constant, nodes, source


def chain(length):
    x = source(0, (3,), "f8")
    for n in range(length):
        x = Expr("add", (x, constant(n, "f8")), "f8")
    return x


def test_a_long_chain_is_pickled_and_has_a_text():
    """As loops that are followed make them: `total += ...`, some thousand times."""
    x = chain(3000)
    again = pickle.loads(pickle.dumps(x))
    assert again == x
    assert hash(again) == hash(x)
    assert repr(x).startswith("add(")
    assert len(repr(x)) <= 2 * LONG


def test_what_several_share_is_pickled_once():
    shared = chain(DEEP - 10)
    both = [Expr("sin", (shared,), "f8"), Expr("cos", (shared,), "f8")]
    first, second = pickle.loads(pickle.dumps(both))
    assert first.args[0] is second.args[0]
    deep = Expr("add", (chain(2 * DEEP),) * 2, "f8")
    (left, right) = pickle.loads(pickle.dumps(deep)).args
    assert left is right


def test_what_outputs_of_a_kernel_share_is_pickled_once():
    """As many sums as there are operations, each of those before it."""
    x, outputs = source(0, (3,), "f8"), []
    for n in range(200):
        x = Expr("add", (x, constant(n, "f8")), "f8")
        outputs.append(x)
    kernel = Kernel((3,), tuple(outputs))
    again = pickle.loads(pickle.dumps(kernel))
    assert again == kernel
    assert len(nodes(again.roots)) == len(nodes(kernel.roots))
    most = Reduction("sum", x, (np.dtype("f8"),))
    reduced = Kernel((3,), (Expr("reduced", (), "f8", (0, 0)),), (most,), (0,))
    assert pickle.loads(pickle.dumps(reduced)) == reduced
    strided = Kernel((3,), (x,), strides=(2,))
    assert pickle.loads(pickle.dumps(strided)) == strided
    picking = replace(strided, strides=None, picks=True)
    assert pickle.loads(pickle.dumps(picking)) == picking != replace(picking, picks=False)


def test_a_text_grows_no_more_than_its_expression():
    """Each use of a shared node would double it."""
    x = source(0, (3,), "f8")
    for _ in range(60):
        x = Expr("multiply", (x, x), "f8")
    assert len(nodes((x,))) == 61
    assert len(repr(x)) <= LONG
