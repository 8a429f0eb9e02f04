"""NumPy's numbers: CuPy's are others."""

import numpy as _np

import cupy


class Philox4x3210:
    def __init__(self, seed=None, size=-1):
        state = getattr(seed, "generate_state", None)
        self.generator = _np.random.Generator(_np.random.Philox(state(4) if state else seed))


XORWOW = Philox4x3210


class RandomState:
    def __init__(self, seed=None):
        self._generator = _np.random.RandomState(seed)

    def __getattr__(self, name):
        function = getattr(self._generator, name)
        return lambda *args, **kwargs: cupy.asarray(cupy._called(function, args, kwargs))


class Generator:
    def __init__(self, bit_generator):
        self._generator = bit_generator.generator

    def __getattr__(self, name):
        function = getattr(self._generator, name)
        return lambda *args, **kwargs: cupy.asarray(cupy._called(function, args, kwargs))
